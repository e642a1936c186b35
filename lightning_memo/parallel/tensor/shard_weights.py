"""Tensor parallelism: splits the weights of each layer over ranks, and with sequence parallelism the tokens, too.

Note: [Who communicates when]
In each attention or MLP block, forward sums the outputs of the last projection over the ranks, and backward sums the
gradients of the block's input. Without sequence parallelism each sum is one all-reduce. With it, forward gathers the
block's input and reduce-scatters its output, and backward does the reverse (Korthikanti et al., "Reducing Activation
Recomputation", section 4.2.2). `TensorPlan` matches the plan with the modules, `assign_styles` chooses a style for each
of them, and `module_styles.py` implements the styles.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from lightning_memo.parallel.device_mesh import ExpertMeshes
from lightning_memo.parallel.tensor.experts import Experts, Mixture, divide_experts
from lightning_memo.parallel.tensor.module_styles import (
    STREAM_TOKEN_DIM,
    Block,
    Colwise,
    Replicated,
    Rowwise,
    TensorStyle,
    VocabularyParallel,
    WholeModel,
    gradient_of_replica,
)
from lightning_memo.parallel.tensor.packed_projections import PackedAttention, PackedColwise
from lightning_memo.parallel.tensor.tensor_plan import COLWISE, EXPERTS, REPLICATED, ROWWISE, TensorPlan, inner_linear
from lightning_memo.utils.class_names import class_name


def shard_tensors(
    module: nn.Module,
    mesh: DeviceMesh,
    sequence_parallel: bool,
    loss_parallel: bool,
    plan: Mapping[str, str] | None = None,
    experts: ExpertMeshes | None = None,
) -> None:
    """Split a model's weights over ranks, in place. Every parameter becomes a `DTensor` on `mesh`.

    Modules pass plain local tensors to each other. With sequence parallelism each rank has `1 / ranks` of the tokens
    between blocks. Ids and positions are given for all tokens, and logits are returned for all tokens.

    Args:
        module: Hugging Face model, possibly with LoRA by peft, any module with `plan`, or a module that contains one.
            All ranks have the same weights. Each keeps its part, and nothing is sent.
        mesh: One-dimensional mesh of the ranks.
        sequence_parallel: Whether to split the tokens between blocks. Their number must be a multiple of the number of
            ranks.
        loss_parallel: Whether the logits are a `DTensor` split in the vocabulary. Otherwise every rank has all logits.
        plan: Styles by dotted module name or a suffix of it, with `*` for a layer's number: `"colwise"`, `"rowwise"`,
            `"colwise_gather_output"`, `"rowwise_split_input"` or `"replicated"`. It takes precedence over the
            `tp_plan` of a Hugging Face model. Attention of another model has to derive its number of heads from the
            shapes of the projections' outputs.
        experts: Where experts are, if other ranks share them with those of `mesh`.

    Raises:
        ValueError: The model has no plan, or the plan does not split it evenly.
    """
    tensor_plan = TensorPlan(module, plan)
    tensor_plan.check_sizes(mesh.size())
    styles = assign_styles(tensor_plan, sequence_parallel, loss_parallel)
    tied = _shared_parameters(module)
    if experts is not None:
        for name, m in tensor_plan.experts.items():
            del styles[name]
            divide_experts([m], experts)
    for name, style in styles.items():
        # One module at a time: parallelize_module would read some characters of a name as wildcards.
        parallelize_module(module.get_submodule(name), mesh, style, src_data_rank=None)
    _tie_again(module, tied)


def check_divisible(module: nn.Module, ranks: int, plan: Mapping[str, str] | None = None) -> None:
    """Check that the weights of a model can be split evenly. Needs no process group.

    Args:
        module: As for `shard_tensors`.
        ranks: Number of ranks.
        plan: As for `shard_tensors`.

    Raises:
        ValueError: A size is not divisible. The message names it and the possible numbers of ranks.
    """
    TensorPlan(module, plan).check_sizes(ranks)


def _shared_parameters(module: nn.Module) -> list[tuple[str, str]]:
    """Returns the names of tied parameters, each with the first name of the same parameter."""
    first: dict[int, str] = {}
    shared = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            shared.append((name, other))
    return shared


def _tie_again(module: nn.Module, tied: list[tuple[str, str]]) -> None:
    for name, other in tied:
        parameter, own = module.get_parameter(other), module.get_parameter(name)
        assert isinstance(parameter, DTensor) and isinstance(own, DTensor)
        if parameter.placements != own.placements:
            raise ValueError(
                f"tensor_parallel_size: {name} and {other} are one parameter, but the plan splits them as "
                f"{own.placements[0]} and {parameter.placements[0]}: give both the same style"
            )
        holder, _, last = name.rpartition(".")
        module.get_submodule(holder)._parameters[last] = parameter


def assign_styles(plan: TensorPlan, sequence_parallel: bool, loss_parallel: bool) -> dict[str, TensorStyle]:
    """Returns a style for every module that has parameters or needs one, in the order of the model.

    Args:
        plan: Tensor-parallel plan of the model.
        sequence_parallel: Whether the tokens between blocks are split over the ranks.
        loss_parallel: Whether the logits stay split in the vocabulary.

    Raises:
        ValueError: The layout of a module's input does not fit its style.
    """
    return _Styling(plan, sequence_parallel, loss_parallel).collect()


class _Styling:
    """Translates a `TensorPlan` to styles."""

    def __init__(self, plan: TensorPlan, sequence_parallel: bool, loss_parallel: bool) -> None:
        self._plan = plan
        self._loss_parallel = loss_parallel
        self._stream: Placement = Shard(STREAM_TOKEN_DIM) if sequence_parallel else Replicate()
        self._blocks = {name: self._block(name) for name in plan.blocks}
        self._mixtures = {name: Mixture(self._stream) for name in plan.mixtures}
        if loss_parallel and plan.head is None and hasattr(plan.model, "get_output_embeddings"):
            raise ValueError(f"loss_parallel=True: {class_name(plan.model)} has no output embeddings")

    def collect(self) -> dict[str, TensorStyle]:
        styles: dict[str, TensorStyle] = {**self._blocks, **self._mixtures}
        for name, style in self._plan.styles.items():
            styles |= self._split(name, self._plan.named[name], style)
        for name, m in self._plan.named.items():
            if name not in styles and m._parameters and any(p is not None for p in m._parameters.values()):
                styles[name] = self._unnamed(name, m)
        styles |= {name: WholeModel(self._stream) for name in self._plan.hosts}
        return {name: styles[name] for name in ("", *self._plan.named) if name in styles}

    def _block(self, name: str) -> Block:
        packing = self._plan.packing(name)
        stream = self._stream_of(name)
        return PackedAttention(stream) if packing and packing.first == "qkv_proj" else Block(stream)

    def _stream_of(self, name: str) -> Placement:
        """Returns the layout of hidden states outside of the block that contains a module."""
        return Replicate() if self._plan.in_mixture(name) else self._stream

    def _split(self, name: str, m: nn.Module, style: str) -> dict[str, TensorStyle]:
        """Returns the styles of a module that the plan names and of the low-rank adapters around it."""
        if hasattr(m, "modules_to_save"):
            copies = [("original_module", m.original_module)]
            copies += [(f"modules_to_save.{adapter}", copy) for adapter, copy in m.modules_to_save.items()]
            return {n: s for part, copy in copies for n, s in self._split(f"{name}.{part}", copy, style).items()}
        if style in EXPERTS:
            return {name: Experts()}
        inner = f"{name}.base_layer" if hasattr(m, "base_layer") else name
        _check_module(inner, inner_linear(m), style)
        main = self._style(name, m, style)
        if inner == name:
            return {name: main}
        return {inner: main} | self._adapters(name, m, style)

    def _style(self, name: str, m: nn.Module, style: str, adapter: bool = False) -> TensorStyle:
        plan, block = self._plan, self._plan.block_of(name)
        if style in REPLICATED:
            if block is None and style == "replicated":
                return self._on_stream(m)
            return Replicated(Replicate() if block and plan.gathers(block) else Partial())
        if isinstance(inner_linear(m), nn.Embedding):
            return VocabularyParallel(self._stream)
        packing = plan.packing(block) if block else None
        if style in ROWWISE:
            return Rowwise(self._stream_of(name), split_input=style == "rowwise_split_input" and packing is None)
        source = None if adapter else self._blocks[block] if block else self._stream_of(name)
        if packing:
            return PackedColwise(source, packing.parts(plan.blocks[block]))
        if plan.head is not None and f"{name}.".startswith(f"{plan.head}."):
            return Colwise(source, "divided" if self._loss_parallel else "gathered")
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
            if style in ROWWISE:
                styles[a] = self._style(name, first, style)
                styles[b] = Replicated(gradient_of_replica(self._stream_of(name)))
            else:
                block = self._plan.block_of(name)
                styles[a] = Replicated(Partial(), enters=None if block else self._stream)
                styles[b] = self._style(name, m, style, adapter=True)
        return styles

    def _unnamed(self, name: str, m: nn.Module) -> Replicated:
        """Returns the style of a module that the plan does not name. Its parameters stay whole."""
        block, matrices = self._plan.block_of(name), any(p.dim() > 1 for p in m.parameters(recurse=False))
        if block is not None:
            return Replicated(self._gradient_inside(block, name, m, matrices))
        if self._plan.in_experts(name):
            return Replicated(Partial())  # each rank has its own experts
        if self._plan.in_mixture(name):
            return Replicated(Replicate())  # routers: every rank computes them for all tokens
        if self._stream.is_shard() and self._plan.in_layers(name) and matrices:
            raise ValueError(
                f"sequence_parallel=True: the plan does not split {name}, which would get only this rank's tokens: set "
                'sequence_parallel=False, or name it "replicated" in tensor_parallel_plan if it works token by token'
            )
        return self._on_stream(m) if self._plan.in_host(name) else Replicated(Replicate())

    def _on_stream(self, m: nn.Module) -> Replicated:
        """Returns the style of a whole module outside of blocks. An embedding gets the ids of all tokens.

        Modules outside of Hugging Face models compute with outputs of these, which are for all tokens.
        """
        if isinstance(m, nn.Embedding):
            return Replicated(Replicate(), leaves=self._stream)
        return Replicated(gradient_of_replica(self._stream))

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


def _check_module(name: str, m: nn.Module, style: str) -> None:
    weight = getattr(m, "weight", None)
    kinds = (nn.Linear,) if style in COLWISE else (nn.Linear, nn.Embedding)
    if style in REPLICATED or (isinstance(m, kinds) and weight.is_floating_point()):
        return
    raise ValueError(
        f'tensor_parallel_size: {name} is {class_name(m)} of {getattr(weight, "dtype", None)}, but style "{style}" '
        "splits nn.Linear with floating-point weights only: do not quantise the model, or leave it out of the plan"
    )
