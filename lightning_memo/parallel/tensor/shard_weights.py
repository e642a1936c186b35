"""Tensor parallelism: splits the weights of each layer over ranks, and with sequence parallelism the tokens, too.

Note: [Who communicates when]
In each attention or MLP block, forward sums the outputs of the last projection over the ranks, and backward sums the
gradients of the block's input. Without sequence parallelism each sum is one all-reduce. With it, forward gathers the
block's input and reduce-scatters its output, and backward does the reverse (Korthikanti et al., "Reducing Activation
Recomputation", section 4.2.2). `TensorPlan` matches the plan, from Hugging Face or the user, with the modules,
`assign_styles` chooses a style for each of them, and `module_styles.py` implements the styles.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from lightning_memo.parallel.device_mesh import ExpertMeshes
from lightning_memo.parallel.tensor.derived_plan import derive_plan
from lightning_memo.parallel.tensor.derived_regions import Region
from lightning_memo.parallel.tensor.experts import Experts, Mixture, is_stacked, shard_experts
from lightning_memo.parallel.tensor.linear_layers import (
    base_layer,
    input_features,
    is_floating_linear,
    is_linear,
    output_features,
)
from lightning_memo.parallel.tensor.local_shares import LocalShares
from lightning_memo.parallel.tensor.module_styles import (
    STREAM_TOKEN_DIM,
    Block,
    Colwise,
    PackedColwise,
    Replicated,
    Rowwise,
    TensorStyle,
    VocabularyParallel,
    WholeModel,
    gradient_of_replica,
)
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face, find_stacks

_COLWISE = ("colwise", "colwise_gather_output")
_ROWWISE = ("rowwise", "rowwise_split_input", "embedding_rowwise")
_REPLICATED = ("replicated", "replicated_with_grad_allreduce")
_EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")
_GATHERING = ("colwise_gather_output", "rowwise_split_input")
_TOLD = 6  # names in a message
ADVICE = "train with context_parallel_size or zero_stage=3 instead, or give tensor_parallel_plan"


@dataclass(frozen=True, slots=True)
class Packing:
    """Names of the projections of a block whose first projection is packed.

    Attributes:
        first: Name of the packed projection.
        last: Name of the last projection of the block.
    """

    first: str
    last: str

    def parts(self, block: nn.Module) -> tuple[int, ...]:
        """Returns the number of output features of each packed matrix."""
        rows = output_features(base_layer(getattr(block, self.first)))
        if self.first == "gate_up_proj":
            return rows // 2, rows // 2
        heads, kv_heads = block.config.num_attention_heads, block.config.num_key_value_heads
        return heads * block.head_dim, kv_heads * block.head_dim, kv_heads * block.head_dim


_SHARES_OF_PACKED = LocalShares(("num_key_value_heads",), ("num_attention_heads", "num_key_value_heads"))
_PACKINGS = (Packing("qkv_proj", "o_proj"), Packing("gate_up_proj", "down_proj"))


class TensorPlan:
    """Styles of the modules of a model, and the blocks that they belong to.

    Args:
        module: Model, or a module that contains it.
        plan: Styles by dotted module name or a suffix of it, with `*` for a layer's number. It takes precedence over
            the `tp_plan` of a Hugging Face model.
        derive: Number of ranks for which the division is derived from runs of the layers; no plan is used then. `None`
            uses plans.

    Raises:
        ValueError: There is no plan, or an entry of it cannot be applied, or none can be derived.
    """

    def __init__(self, module: nn.Module, plan: Mapping[str, str] | None = None, derive: int | None = None) -> None:
        self.module = module
        # Looked up in the class, because peft's wrappers forward every attribute to the inner model.
        found_hosts = {name: m for name, m in module.named_modules() if hasattr(type(m), "tp_plan")}
        self.model = next(iter(found_hosts.values()), module)
        self.hosts = [
            name for name in found_hosts if not _is_in(name, [other for other in found_hosts if other != name])
        ]
        self.named = {name: m for name, m in module.named_modules() if name}
        self.derived = derive_plan(self.model, self.named, derive) if derive else None
        if self.derived is not None:
            self.styles = self.derived.styles()
        else:
            plans = (plan or {}, getattr(self.model, "tp_plan", None) or {})
            found = {name: next(filter(None, (_match(name, p) for p in plans)), None) for name in self.named}
            self.styles = {name: style for name, style in found.items() if style is not None}
            self._check_matches(plan or {})
        self._check_styles()
        self.experts = {name: self.named[name] for name, style in self.styles.items() if style in _EXPERTS}
        self.embedding, self.head = self._ends()
        self.styles |= {end: style for end, style in ((self.embedding, "rowwise"), (self.head, "colwise")) if end}
        self.styles |= dict.fromkeys(self._tied_embeddings(), "rowwise")
        if self.derived is None and not self.projections():
            raise ValueError(
                f"tensor_parallel_size: {class_name(self.model)} has no tp_plan that says how the weights of its "
                f"layers are split: {ADVICE}"
            )
        self.layers_path, self.layers = self._find_layers()
        self.regions = {} if self.derived is None else {r.block: r for r in self.derived.regions if r.block}
        self.blocks = self._find_blocks() if self.derived is None else {b: self.named[b] for b in self.regions}
        self.mixtures = {name.rpartition(".")[0]: self.named[name.rpartition(".")[0]] for name in self.experts}
        if self.derived is None:
            self._check_blocks()
        self._check_experts()

    def describe_derived(self) -> str | None:
        """Returns one line on what is divided, if it was derived; otherwise `None`."""
        if self.derived is None:
            return None
        line = f"tensor parallelism divides {class_name(self.model)} as runs of its layers prove"
        whole = self.derived.whole
        if not whole:
            return line
        more = f" and {len(whole) - _TOLD} more" if len(whole) > _TOLD else ""
        return f"{line}; these linear layers stay whole on each process: {', '.join(whole[:_TOLD])}{more}"

    def _check_styles(self) -> None:
        known = (*_COLWISE, *_ROWWISE, *_REPLICATED, *_EXPERTS)
        for name, style in self.styles.items():
            if style not in known:
                raise ValueError(
                    f'tensor_parallel_size: style "{style}" of {name} is not known, only {", ".join(known)}: {ADVICE}'
                )

    def _check_matches(self, plan: Mapping[str, str]) -> None:
        for pattern in plan:
            if not any(_names(pattern, name) for name in self.named):
                raise ValueError(
                    f'tensor_parallel_plan: "{pattern}" names no module: names are like "{_example(self.named)}"'
                )

    def _ends(self) -> tuple[str | None, str | None]:
        """Returns the names of the token embedding and the output head; `None` where the model does not define them."""
        names = {id(m): name for name, m in self.named.items()}
        ends: list[str | None] = []
        for end in ("input", "output"):
            found = None
            with contextlib.suppress(NotImplementedError):  # transformers does not know all models' embeddings
                found = getattr(self.model, f"get_{end}_embeddings", lambda: None)()
            if end == "output" and isinstance(base_layer(found), nn.Embedding):
                found = None  # FSMT names a table that has the weight of its head
            splittable = _is_table(base_layer(found)) or is_floating_linear(base_layer(found))
            ends.append(names.get(id(found)) if splittable or self.derived is None else None)
        return ends[0], ends[1]

    def _tied_embeddings(self) -> list[str]:
        """Returns the names of embeddings that have the same weight as the token embedding."""
        weight = None if self.embedding is None else getattr(self.named[self.embedding], "weight", None)
        tied = (name for name, m in self.named.items() if _is_table(m) and m.weight is weight)
        return [name for name in tied if name not in self.styles]

    def projections(self) -> dict[str, str]:
        """Returns the names and styles of the linear layers that are split, except the output head."""
        return {
            name: style
            for name, style in self.styles.items()
            if style not in _REPLICATED and name != self.head and is_linear(base_layer(self.named[name]))
        }

    def _find_layers(self) -> tuple[str, list[nn.Module]]:
        try:
            stack = find_stacks(self.module)[0]
        except ValueError:
            return "", []
        return stack.name, list(stack.layers)

    def _find_blocks(self) -> dict[str, nn.Module]:
        """Returns the attention and MLP modules: the parents of column-wise layers.

        Transformer layers and modules that contain them are not blocks.
        """
        outside = [*self.layers, self.module, self.model]
        outside += [m for name, m in self.named.items() if f"{self.layers_path}.".startswith(f"{name}.")]
        colwise = (name for name, style in self.projections().items() if style in _COLWISE)
        parents = dict.fromkeys(name.rpartition(".")[0] for name in colwise)
        blocks = [name for name in parents if name and self.named[name] not in outside]
        nested = [name for name in blocks if any(name.startswith(f"{other}.") for other in blocks)]
        return {name: self.named[name] for name in blocks if name not in nested}

    def _check_blocks(self) -> None:
        for block, m in self.blocks.items():
            styles = [style for name, style in self.projections().items() if self.block_of(name) == block]
            rowwise = sum(style in _ROWWISE for style in styles)
            if rowwise != 1:
                raise ValueError(
                    f"tensor_parallel_size: the plan splits {rowwise} layers of {block} row-wise, but has to split "
                    f"exactly one so, the last: {ADVICE}"
                )
            if own := [name for name, p in m._parameters.items() if p is not None]:
                raise ValueError(f"tensor_parallel_size: {block} has weights of its own ({', '.join(own)}): {ADVICE}")

    def _check_experts(self) -> None:
        for name, m in self.experts.items():
            if not is_stacked(m):
                raise ValueError(
                    f"tensor_parallel_size: the experts ({name}) do not have stacked weights, [experts, ...], or do "
                    f"not get hidden states, choices and their weights: train {class_name(self.model)} with "
                    "context_parallel_size or zero_stage=3 instead"
                )
        for name, m in self.mixtures.items():
            if m in self.layers or any(p is not None for p in m._parameters.values()):
                raise ValueError(
                    f"tensor_parallel_size: {name}, which contains experts, is a whole layer or has weights of its own"
                    f": {ADVICE}"
                )

    def in_host(self, name: str) -> bool:
        """Whether a module is part of a Hugging Face model, or of another model with a plan."""
        return not self.hosts or _is_in(name, self.hosts)

    def in_mixture(self, name: str) -> bool:
        """Whether a module is inside of a mixture of experts."""
        return any(name.startswith(f"{mixture}.") for mixture in self.mixtures)

    def in_experts(self, name: str) -> bool:
        """Whether a module is inside of experts."""
        return any(name.startswith(f"{experts}.") for experts in self.experts)

    def block_of(self, name: str) -> str | None:
        """Returns the name of the block that contains a module, or `None`."""
        return next((block for block in self.blocks if name.startswith(f"{block}.")), None)

    def in_layers(self, name: str) -> bool:
        """Whether a module is part of a transformer layer."""
        return bool(self.layers_path) and name.startswith(f"{self.layers_path}.")

    def gathers(self, block: str) -> bool:
        """Whether every rank computes the whole block except its projections."""
        inside = [style for name, style in self.styles.items() if self.block_of(name) == block]
        return self.packing(block) is None and all(style in (*_GATHERING, *_REPLICATED) for style in inside)

    def packing(self, block: str) -> Packing | None:
        """Returns the packed projections of a block, or `None` if it has none of the known kinds."""
        for packing in _PACKINGS:
            first, last = f"{block}.{packing.first}", f"{block}.{packing.last}"
            if self.styles.get(first) == "colwise_gather_output" and self.styles.get(last) == "rowwise_split_input":
                return packing
        return None

    def parts(self, name: str) -> tuple[int, ...]:
        """Returns the numbers of output features of the parts of a column-wise layer of a derived plan."""
        assert self.derived is not None
        return next(r.colwise[name] for r in self.derived.regions if name in r.colwise)

    def split_sizes(self) -> Iterator[tuple[str, int]]:
        """Yields the name and value of every size that the number of ranks has to divide."""
        config = getattr(self.model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        shared = [b for b in self.blocks if not self.gathers(b)]
        names = {"attn": ("num_attention_heads", "num_key_value_heads"), "mlp": ("intermediate_size",)}
        for kind, settings in names.items():
            if any(kind in b.rpartition(".")[2].replace("attention", "attn") for b in shared):
                values = ((name, getattr(config, name, None)) for name in settings)
                yield from ((name, value) for name, value in values if isinstance(value, int))
        yield from ((f"num_experts of {name}", int(m.num_experts)) for name, m in self.experts.items())
        for name, style in self.projections().items():
            side = "out_features" if style in _COLWISE else "in_features"
            size = output_features if style in _COLWISE else input_features
            yield f"{side} of {name}", size(base_layer(self.named[name]))

    def check_sizes(self, ranks: int) -> None:
        """Raise if a number of ranks does not divide all sizes; see `find_plan`."""
        if self.derived is not None:
            return  # for one number of ranks
        sizes = list(self.split_sizes())
        common = math.gcd(*(size for _, size in sizes))
        allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        for name, size in sizes:
            if size % ranks:
                raise ValueError(
                    f"tensor_parallel_size={ranks} does not divide {name}={size} of {class_name(self.model)}: it "
                    f"can be {allowed}; for more GPUs set context_parallel_size, or leave them to data parallelism"
                )


def _match(name: str, plan: Mapping[str, str]) -> str | None:
    """Returns the plan's style for a module, by the longest pattern that matches its name or a suffix of it."""
    matching = [pattern for pattern in plan if _names(pattern, name)]
    return plan[max(matching, key=len)] if matching else None


def _names(pattern: str, name: str) -> bool:
    number = re.escape(pattern).replace(r"\*", r"\d+")
    return re.search(rf"(?:^|\.){number}$", name) is not None


def _example(named: Mapping[str, nn.Module]) -> str:
    return next((name for name, m in named.items() if isinstance(m, nn.Linear)), next(iter(named), ""))


def _is_in(name: str, containers: Iterable[str]) -> bool:
    """Whether a dotted name is that of one of the containers, or of a module inside of one."""
    return any(not container or f"{name}.".startswith(f"{container}.") for container in containers)


def shard_tensors(
    module: nn.Module,
    mesh: DeviceMesh,
    sequence_parallel: bool,
    plan: TensorPlan | Mapping[str, str] | None = None,
    experts: ExpertMeshes | None = None,
) -> None:
    """Split a model's weights over ranks, in place. Every parameter becomes a `DTensor` on `mesh`.

    Modules pass plain local tensors to each other. With sequence parallelism each rank has `1 / ranks` of the tokens
    between blocks. Ids and positions are given for all tokens, and logits are returned for all tokens, as a `DTensor`
    split in the vocabulary.

    Args:
        module: Hugging Face model, possibly with LoRA by peft, any module with `plan`, or a module that contains one.
            All ranks have the same weights. Each keeps its part, and nothing is sent.
        mesh: One-dimensional mesh of the ranks.
        sequence_parallel: Whether to split the tokens between blocks. Their number must be a multiple of the number of
            ranks.
        plan: What :func:`find_plan` has found for this number of ranks, or its argument.
        experts: Where experts are, if other ranks share them with those of `mesh`.

    Raises:
        ValueError: The model has no plan, or the plan does not split it evenly.
    """
    tensor_plan = plan if isinstance(plan, TensorPlan) else find_plan(module, mesh.size(), plan)
    styles = assign_styles(tensor_plan, sequence_parallel)
    tied = _shared_parameters(module)
    if experts is not None:
        for name, m in tensor_plan.experts.items():
            del styles[name]
            shard_experts([m], experts)
    for name, style in styles.items():
        # One module at a time: parallelize_module would read some characters of a name as wildcards.
        parallelize_module(module.get_submodule(name), mesh, style, src_data_rank=None)
    _tie_again(module, tied, tensor_plan.styles)


def find_plan(module: nn.Module, ranks: int, plan: Mapping[str, str] | None = None) -> TensorPlan:
    """Find out how the weights of a model are split evenly. Needs no process group.

    Without `plan`, this is the `tp_plan` of a Hugging Face model, or, if it has none that can be followed, what runs of
    its layers prove; see Note: [A region, and its proof].

    Args:
        module: As for `shard_tensors`.
        ranks: Number of ranks.
        plan: Styles by dotted module name or a suffix of it, with `*` for a layer's number: `"colwise"`, `"rowwise"`,
            `"colwise_gather_output"`, `"rowwise_split_input"` or `"replicated"`. It takes precedence over the
            `tp_plan` of a Hugging Face model. Attention of another model has to derive its number of heads from the
            shapes of the projections' outputs.

    Raises:
        ValueError: There is no plan and none can be derived, the plan cannot be followed, or a size is not divisible.
            The message names it and the possible numbers of ranks.
    """
    try:
        found = TensorPlan(module, plan)
        assign_styles(found, sequence_parallel=False)
    except ValueError as refused:
        if plan is not None or not find_hugging_face(module):
            raise
        try:
            return TensorPlan(module, derive=ranks)
        except ValueError as error:
            raise ValueError(f"{refused}; a plan could not be derived either: {error}") from error
    found.check_sizes(ranks)
    return found


def _shared_parameters(module: nn.Module) -> list[tuple[str, str]]:
    """Returns the names of tied parameters, each with the first name of the same parameter."""
    first: dict[int, str] = {}
    shared = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            shared.append((name, other))
    return shared


def _tie_again(module: nn.Module, tied: list[tuple[str, str]], named: Collection[str]) -> None:
    for name, other in tied:
        parameter, own = module.get_parameter(other), module.get_parameter(name)
        assert isinstance(parameter, DTensor) and isinstance(own, DTensor)
        if parameter.placements != own.placements:
            # What the plan does not name may hold a bias for another module. A part of it would fit nothing else.
            planned = [p for n, p in ((name, own), (other, parameter)) if n.rpartition(".")[0] in named]
            if own.dim() > 1 or len(planned) != 1:
                raise ValueError(
                    f"tensor_parallel_size: {name} and {other} are one parameter, but the plan splits them as "
                    f"{own.placements[0]} and {parameter.placements[0]}: give both the same style"
                )
            parameter = planned[0]
        for each in (name, other):
            holder, _, last = each.rpartition(".")
            module.get_submodule(holder)._parameters[last] = parameter


def assign_styles(plan: TensorPlan, sequence_parallel: bool) -> dict[str, TensorStyle]:
    """Returns a style for every module that has parameters or needs one, in the order of the model.

    Args:
        plan: Tensor-parallel plan of the model.
        sequence_parallel: Whether the tokens between blocks are split over the ranks.

    Raises:
        ValueError: The layout of a module's input does not fit its style.
    """
    if sequence_parallel and plan.derived is not None:
        raise ValueError(
            f"sequence_parallel=True: how {class_name(plan.model)} is divided was derived from its layers, and what "
            "they compute between attention and MLP is not known to take each token by itself: set "
            "sequence_parallel=False"
        )
    return _Styling(plan, sequence_parallel).collect()


class _Styling:
    """Translates a `TensorPlan` to styles."""

    def __init__(self, plan: TensorPlan, sequence_parallel: bool) -> None:
        self._plan = plan
        self._stream: Placement = Shard(STREAM_TOKEN_DIM) if sequence_parallel else Replicate()
        self._blocks = {name: self._block(name) for name in plan.blocks}
        self._mixtures = {name: Mixture(self._stream) for name in plan.mixtures}

    def collect(self) -> dict[str, TensorStyle]:
        styles: dict[str, TensorStyle] = {**self._blocks, **self._mixtures}
        for name, style in self._plan.styles.items():
            styles |= self._split(name, self._plan.named[name], style)
        divided = {".".join(parts[:n]) for parts in (name.split(".") for name in styles) for n in range(len(parts) + 1)}
        exposed: list[str] = []
        for name, m in self._plan.named.items():
            if name in styles:
                continue
            # A layer may be computed by modules that read the weights of others inside of them.
            everything = name not in divided and self._plan.in_layers(name) and not _is_in(name, exposed)
            exposed += [name] if everything else []
            if any(p is not None for p in (m.parameters() if everything else m._parameters.values())):
                styles[name] = self._unnamed(name, m, everything)
        styles |= {name: WholeModel(self._stream) for name in self._plan.hosts}
        return {name: styles[name] for name in ("", *self._plan.named) if name in styles}

    def _block(self, name: str) -> Block:
        packing, stream = self._plan.packing(name), self._stream_of(name)
        if packing and packing.first == "qkv_proj":
            return Block(stream, _SHARES_OF_PACKED)
        region = self._plan.regions.get(name)
        return Block(stream) if region is None else Block(stream, region.shares, _own(region.per_head, name))

    def _stream_of(self, name: str) -> Placement:
        """Returns the layout of hidden states outside of the block that contains a module."""
        return Replicate() if self._plan.in_mixture(name) else self._stream

    def _split(self, name: str, m: nn.Module, style: str) -> dict[str, TensorStyle]:
        """Returns the styles of a module that the plan names and of the low-rank adapters around it."""
        if hasattr(m, "modules_to_save"):
            copies = [("original_module", m.original_module)]
            copies += [(f"modules_to_save.{adapter}", copy) for adapter, copy in m.modules_to_save.items()]
            return {n: s for part, copy in copies for n, s in self._split(f"{name}.{part}", copy, style).items()}
        if style in _EXPERTS:
            return {name: Experts()}
        inner = f"{name}.base_layer" if hasattr(m, "base_layer") else name
        _check_module(inner, base_layer(m), style)
        main = self._style(name, m, style)
        if inner == name:
            return {name: main}
        return {inner: main} | self._adapters(name, m, style)

    def _style(self, name: str, m: nn.Module, style: str, adapter: bool = False) -> TensorStyle:
        plan, block = self._plan, self._plan.block_of(name)
        if style in _REPLICATED:
            if block is None and style == "replicated":
                return self._on_stream(m)
            return Replicated(Replicate() if block and plan.gathers(block) else Partial())
        if isinstance(base_layer(m), nn.Embedding):
            return VocabularyParallel(self._stream)
        packing = plan.packing(block) if block else None
        if style in _ROWWISE:
            return Rowwise(self._stream_of(name), split_input=style == "rowwise_split_input" and packing is None)
        source = None if adapter else self._blocks[block] if block else self._stream_of(name)
        if plan.derived is not None and plan.head != name:
            parts = plan.parts(name)
            source = None if block else source  # proven for this input
            return Colwise(source) if len(parts) == 1 else PackedColwise(source, parts)
        if packing:
            return PackedColwise(source, packing.parts(plan.blocks[block]))
        if plan.head is not None and f"{name}.".startswith(f"{plan.head}."):
            return Colwise(source, "divided")
        if block is None and self._stream.is_shard() and style == "colwise":
            raise ValueError(
                f"sequence_parallel=True: {name} is not inside an attention or MLP module, so it gets only this rank's "
                "tokens: put it into such a module, or set sequence_parallel=False"
            )
        return Colwise(source, "gathered" if style == "colwise_gather_output" else "local")

    def _adapters(self, name: str, m: nn.Module, style: str) -> dict[str, TensorStyle]:
        """Returns the styles of LoRA next to a linear layer, `y = W x + B A x`.

        If `W` is column-wise, every rank computes all of `A x` and its own rows of `B`. If `W` is row-wise, `A x` is
        summed over the ranks like `W x`, and `B` is applied to the stream.
        """
        if getattr(m, "lora_variant", None) or not getattr(m, "lora_A", None):
            raise ValueError(f"tensor_parallel_size: of adapters only plain LoRA on linear layers is split, not {name}")
        styles: dict[str, TensorStyle] = {}
        for adapter, first in m.lora_A.items():
            a, b = f"{name}.lora_A.{adapter}", f"{name}.lora_B.{adapter}"
            if style in _ROWWISE:
                styles[a] = self._style(name, first, style)
                styles[b] = Replicated(gradient_of_replica(self._stream_of(name)))
            else:
                block = self._plan.block_of(name)
                styles[a] = Replicated(Partial(), enters=None if block else self._stream)
                styles[b] = self._style(name, m, style, adapter=True)
        return styles

    def _unnamed(self, name: str, m: nn.Module, everything: bool) -> Replicated:
        """Returns the style of a module that the plan does not name, or of everything inside. Parameters stay whole."""
        block, matrices = self._plan.block_of(name), any(p.dim() > 1 for p in m.parameters(recurse=everything))
        if block in self._plan.regions:
            return self._inside(self._plan.regions[block], name, m)
        if block is not None:
            return Replicated(self._gradient_inside(block, name, m, matrices))
        if self._plan.in_experts(name):
            return Replicated(Partial(), everything=everything)  # each rank has its own experts
        if self._plan.in_mixture(name):
            return Replicated(Replicate(), everything=everything)  # routers: every rank computes them for all tokens
        if self._stream.is_shard() and self._plan.in_layers(name) and matrices:
            matrix = next(n for n, p in m.named_parameters(prefix=name) if p.dim() > 1).rpartition(".")[0]
            raise ValueError(
                f"sequence_parallel=True: the plan does not split {matrix}, which would get only this rank's tokens: "
                'set sequence_parallel=False, or name it "replicated" in tensor_parallel_plan if it takes single tokens'
            )
        return self._on_stream(m, everything) if self._plan.in_host(name) else Replicated(Replicate())

    def _inside(self, region: Region, name: str, m: nn.Module) -> Replicated:
        """Returns the style of a module inside of a derived region."""
        own = {f"{name}.{parameter}" for parameter in m._parameters}
        beyond = own <= set(region.beyond)
        return Replicated(Replicate() if beyond else Partial(), divided=_own(region.per_head, name))

    def _on_stream(self, m: nn.Module, everything: bool = False) -> Replicated:
        """Returns the style of a whole module outside of blocks. An embedding gets the ids of all tokens.

        Modules outside of Hugging Face models compute with outputs of these, which are for all tokens.
        """
        if isinstance(m, nn.Embedding):
            return Replicated(Replicate(), leaves=self._stream if self._stream.is_shard() else None)
        return Replicated(gradient_of_replica(self._stream), everything=everything)

    def _gradient_inside(self, block: str, name: str, m: nn.Module, matrices: bool) -> Placement:
        """Returns the layout of the gradient of a replicated parameter in a block."""
        if self._plan.gathers(block) and not matrices:
            return Replicate()  # a norm of a gathered tensor
        holder = self._plan.blocks[block]
        head_dim = getattr(holder, "head_dim", None) or getattr(holder, "head_size", None)
        if not self._plan.gathers(block) and all(p.shape == (head_dim,) for p in m.parameters()):
            return Partial()  # applied to each head, and each rank has its own heads
        raise ValueError(
            f"tensor_parallel_size: the plan splits {block} and does not name {name} inside it: name it in "
            "tensor_parallel_plan, or train with context_parallel_size or zero_stage=3 instead"
        )


def _own(parameters: Iterable[str], holder: str) -> tuple[str, ...]:
    """Returns the names in a module of its own parameters among those of the model."""
    split = (name.rpartition(".") for name in parameters)
    return tuple(last for path, _, last in split if path == holder)


def _check_module(name: str, m: nn.Module, style: str) -> None:
    weight = getattr(m, "weight", None)
    splittable = is_linear(m) or (style not in _COLWISE and _is_table(m))
    if style in _REPLICATED or (splittable and weight.is_floating_point()):
        return
    raise ValueError(
        f'tensor_parallel_size: {name} is {class_name(m)} of {getattr(weight, "dtype", None)}, but style "{style}" '
        "splits nn.Linear with floating-point weights only, and nn.Embedding with nothing inside: do not quantise the "
        "model, or leave it out of the plan"
    )


def _is_table(m: nn.Module | None) -> bool:
    """Whether a module is an embedding of which each rank can have some rows: it has no other weights."""
    return isinstance(m, nn.Embedding) and len(list(m.parameters())) == 1
