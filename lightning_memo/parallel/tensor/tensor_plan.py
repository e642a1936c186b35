"""A tensor-parallel plan, from Hugging Face or the user, matched with the modules and blocks of a model."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_memo.parallel.tensor.experts import is_stacked
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_stacks

COLWISE = ("colwise", "colwise_gather_output")
ROWWISE = ("rowwise", "rowwise_split_input", "embedding_rowwise")
REPLICATED = ("replicated", "replicated_with_grad_allreduce")
EXPERTS = ("moe_tp_experts", "ep_dispatch_experts")
_GATHERING = ("colwise_gather_output", "rowwise_split_input")
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
        rows = inner_linear(getattr(block, self.first)).out_features
        if self.first == "gate_up_proj":
            return rows // 2, rows // 2
        heads, kv_heads = block.config.num_attention_heads, block.config.num_key_value_heads
        return heads * block.head_dim, kv_heads * block.head_dim, kv_heads * block.head_dim


_PACKINGS = (Packing("qkv_proj", "o_proj"), Packing("gate_up_proj", "down_proj"))


class TensorPlan:
    """Styles of the modules of a model, and the blocks that they belong to.

    Args:
        module: Model, or a module that contains it.
        plan: Styles by dotted module name or a suffix of it, with `*` for a layer's number. It takes precedence over
            the `tp_plan` of a Hugging Face model.

    Raises:
        ValueError: There is no plan, or an entry of it cannot be applied.
    """

    def __init__(self, module: nn.Module, plan: Mapping[str, str] | None = None) -> None:
        self.module = module
        # Looked up in the class, because peft's wrappers forward every attribute to the inner model.
        found_hosts = {name: m for name, m in module.named_modules() if hasattr(type(m), "tp_plan")}
        self.model = next(iter(found_hosts.values()), module)
        self.hosts = [
            name for name in found_hosts if not _is_in(name, [other for other in found_hosts if other != name])
        ]
        self.named = {name: m for name, m in module.named_modules() if name}
        plans = (plan or {}, getattr(self.model, "tp_plan", None) or {})
        found = {name: next(filter(None, (_match(name, p) for p in plans)), None) for name in self.named}
        self.styles = {name: style for name, style in found.items() if style is not None}
        self._check_matches(plan or {})
        self._check_styles()
        self.experts = {name: self.named[name] for name, style in self.styles.items() if style in EXPERTS}
        self.embedding, self.head = self._ends()
        self.styles |= {end: style for end, style in ((self.embedding, "rowwise"), (self.head, "colwise")) if end}
        if not self.projections():
            raise ValueError(
                f"tensor_parallel_size: {class_name(self.model)} has no tp_plan that says how the weights of its "
                f"layers are split: {ADVICE}"
            )
        self.layers_path, self.layers = self._find_layers()
        self.blocks = self._find_blocks()
        self.mixtures = {name.rpartition(".")[0]: self.named[name.rpartition(".")[0]] for name in self.experts}
        self._check_blocks()
        self._check_experts()

    def _check_styles(self) -> None:
        known = (*COLWISE, *ROWWISE, *REPLICATED, *EXPERTS)
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
            ends.append(names.get(id(found)))
        return ends[0], ends[1]

    def projections(self) -> dict[str, str]:
        """Returns the names and styles of the linear layers that are split, except the output head."""
        return {
            name: style
            for name, style in self.styles.items()
            if style not in REPLICATED and name != self.head and isinstance(inner_linear(self.named[name]), nn.Linear)
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
        colwise = (name for name, style in self.projections().items() if style in COLWISE)
        parents = dict.fromkeys(name.rpartition(".")[0] for name in colwise)
        blocks = [name for name in parents if name and self.named[name] not in outside]
        nested = [name for name in blocks if any(name.startswith(f"{other}.") for other in blocks)]
        return {name: self.named[name] for name in blocks if name not in nested}

    def _check_blocks(self) -> None:
        for block, m in self.blocks.items():
            styles = [style for name, style in self.projections().items() if self.block_of(name) == block]
            rowwise = sum(style in ROWWISE for style in styles)
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
        return self.packing(block) is None and all(style in (*_GATHERING, *REPLICATED) for style in inside)

    def packing(self, block: str) -> Packing | None:
        """Returns the packed projections of a block, or `None` if it has none of the known kinds."""
        for packing in _PACKINGS:
            first, last = f"{block}.{packing.first}", f"{block}.{packing.last}"
            if self.styles.get(first) == "colwise_gather_output" and self.styles.get(last) == "rowwise_split_input":
                return packing
        return None

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
            side = "out_features" if style in COLWISE else "in_features"
            yield f"{side} of {name}", getattr(inner_linear(self.named[name]), side)

    def check_sizes(self, ranks: int) -> None:
        """Raise if a number of ranks does not divide all sizes; see `check_divisible`."""
        sizes = list(self.split_sizes())
        common = math.gcd(*(size for _, size in sizes))
        allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        for name, size in sizes:
            if size % ranks:
                raise ValueError(
                    f"tensor_parallel_size={ranks} does not divide {name}={size} of {class_name(self.model)}: it "
                    f"can be {allowed}; for more GPUs set context_parallel_size or data_parallel_size"
                )


def _match(name: str, plan: Mapping[str, str]) -> str | None:
    """Returns the plan's style for a module, by the longest pattern that matches its name or a suffix of it."""
    matching = [pattern for pattern in plan if _names(pattern, name)]
    return plan[max(matching, key=len)] if matching else None


def _names(pattern: str, name: str) -> bool:
    number = re.escape(pattern).replace(r"\*", r"\d+")
    return re.search(rf"(?:^|\.){number}$", name) is not None


def inner_linear(m: nn.Module) -> nn.Module:
    """Returns the layer inside an adapter, or the module itself."""
    return getattr(m, "base_layer", m)


def _example(named: Mapping[str, nn.Module]) -> str:
    return next((name for name, m in named.items() if isinstance(m, nn.Linear)), next(iter(named), ""))


def _is_in(name: str, containers: Iterable[str]) -> bool:
    """Whether a dotted name is that of one of the containers, or of a module inside of one."""
    return any(not container or f"{name}.".startswith(f"{container}.") for container in containers)
