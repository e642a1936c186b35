"""A tensor-parallel plan, Hugging Face's or the user's, read against a model: what is split, and in which blocks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from lightning_memo.utils.find_layers import find_layers

COLWISE = ("colwise", "colwise_gather_output")
ROWWISE = ("rowwise", "rowwise_split_input", "embedding_rowwise")
REPLICATED = ("replicated", "replicated_with_grad_allreduce")
_GATHERING = ("colwise_gather_output", "rowwise_split_input")
ADVICE = "train with context_parallel_size or zero_stage=3 instead, or give tensor_parallel_plan"


@dataclass(frozen=True, slots=True)
class Packing:
    """A block whose first projection holds several matrices.

    Attributes:
        first: Name of the packed projection.
        last: Name of the one that takes what is made of its output.
    """

    first: str
    last: str

    def parts(self, block: nn.Module) -> tuple[int, ...]:
        """Output features of each matrix."""
        rows = inner_linear(getattr(block, self.first)).out_features
        if self.first == "gate_up_proj":
            return rows // 2, rows // 2
        heads, kv_heads = block.config.num_attention_heads, block.config.num_key_value_heads
        return heads * block.head_dim, kv_heads * block.head_dim, kv_heads * block.head_dim


_PACKINGS = (Packing("qkv_proj", "o_proj"), Packing("gate_up_proj", "down_proj"))


class TensorPlan:
    """Which modules of a model are split, and how.

    Args:
        module: The model, or what holds it.
        plan: Style by dotted name, whole or from some dot on; `*` stands for a layer's number. It goes before the
            `tp_plan` of a Hugging Face model.

    Raises:
        ValueError: There is no plan, or it has an entry that cannot be followed.
    """

    def __init__(self, module: nn.Module, plan: Mapping[str, str] | None = None) -> None:
        self.module = module
        # Asked of the class: peft's wrappers have every attribute of the model inside.
        self.model = next((m for m in module.modules() if hasattr(type(m), "tp_plan")), module)
        self.named = {name: m for name, m in module.named_modules() if name}
        plans = (plan or {}, getattr(self.model, "tp_plan", None) or {})
        found = {name: next(filter(None, (_match(name, p) for p in plans)), None) for name in self.named}
        self.styles = {name: style for name, style in found.items() if style is not None}
        self._check_matches(plan or {})
        self._check_styles()
        self.embedding, self.head = self._ends()
        self.styles |= {end: style for end, style in ((self.embedding, "rowwise"), (self.head, "colwise")) if end}
        if not self.projections():
            raise ValueError(
                f"tensor_parallel_size: {type(self.model).__name__} has no tp_plan that says how the weights of its "
                f"layers are split: {ADVICE}"
            )
        self.layers_path, self.layers = self._find_layers()
        self.blocks = self._find_blocks()
        self._check_blocks()

    def _check_styles(self) -> None:
        known = (*COLWISE, *ROWWISE, *REPLICATED)
        for name, style in self.styles.items():
            if "expert" in name:
                raise ValueError(
                    f"tensor_parallel_size: experts ({name}) are not split by tensor parallelism: train "
                    f"{type(self.model).__name__} with context_parallel_size or zero_stage=3 instead"
                )
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
        """Names of the embedding of tokens and the output head, as far as the model tells."""
        names = {id(m): name for name, m in self.named.items()}
        ends = (getattr(self.model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output"))
        embedding, head = (names.get(id(m)) for m in ends)
        return embedding, head

    def projections(self) -> dict[str, str]:
        """The linear layers that are split, the head not among them, and their styles."""
        return {
            name: style
            for name, style in self.styles.items()
            if style not in REPLICATED and name != self.head and isinstance(inner_linear(self.named[name]), nn.Linear)
        }

    def _find_layers(self) -> tuple[str, list[nn.Module]]:
        try:
            path, layers = find_layers(self.module)
        except ValueError:
            return "", []
        return path, list(layers)

    def _find_blocks(self) -> dict[str, nn.Module]:
        """The attention and MLP modules: those that hold column-wise layers, but for layers and what is around them."""
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

    def block_of(self, name: str) -> str | None:
        """Name of the block that a module is in, or `None`."""
        return next((block for block in self.blocks if name.startswith(f"{block}.")), None)

    def in_layers(self, name: str) -> bool:
        """Whether a module is part of a layer."""
        return bool(self.layers_path) and name.startswith(f"{self.layers_path}.")

    def gathers(self, block: str) -> bool:
        """Whether every rank computes the whole of a block, but for its projections."""
        inside = [style for name, style in self.styles.items() if self.block_of(name) == block]
        return self.packing(block) is None and all(style in (*_GATHERING, *REPLICATED) for style in inside)

    def packing(self, block: str) -> Packing | None:
        """The packed projection of a block, where it is one whose parts are known."""
        for packing in _PACKINGS:
            first, last = f"{block}.{packing.first}", f"{block}.{packing.last}"
            if self.styles.get(first) == "colwise_gather_output" and self.styles.get(last) == "rowwise_split_input":
                return packing
        return None

    def split_sizes(self) -> Iterator[tuple[str, int]]:
        """Everything that the number of ranks has to divide, with a name for it."""
        config = getattr(self.model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        shared = [b for b in self.blocks if not self.gathers(b)]
        names = {"attn": ("num_attention_heads", "num_key_value_heads"), "mlp": ("intermediate_size",)}
        for kind, settings in names.items():
            if any(kind in b.rpartition(".")[2].replace("attention", "attn") for b in shared):
                values = ((name, getattr(config, name, None)) for name in settings)
                yield from ((name, value) for name, value in values if isinstance(value, int))
        for name, style in self.projections().items():
            side = "out_features" if style in COLWISE else "in_features"
            yield f"{side} of {name}", getattr(inner_linear(self.named[name]), side)

    def check_sizes(self, ranks: int) -> None:
        """Refuse a number of ranks that does not divide everything; see `check_divisible`."""
        sizes = list(self.split_sizes())
        common = math.gcd(*(size for _, size in sizes))
        allowed = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
        for name, size in sizes:
            if size % ranks:
                raise ValueError(
                    f"tensor_parallel_size={ranks} does not divide {name}={size} of {type(self.model).__name__}: it "
                    f"can be {allowed}; for more GPUs set context_parallel_size or data_parallel_size"
                )


def _match(name: str, plan: Mapping[str, str]) -> str | None:
    """The plan's style for a module: of the longest pattern that is its name, or the rest of it from some dot on."""
    matching = [pattern for pattern in plan if _names(pattern, name)]
    return plan[max(matching, key=len)] if matching else None


def _names(pattern: str, name: str) -> bool:
    number = re.escape(pattern).replace(r"\*", r"\d+")
    return re.search(rf"(?:^|\.){number}$", name) is not None


def inner_linear(m: nn.Module) -> nn.Module:
    """The layer inside of an adapter."""
    return getattr(m, "base_layer", m)


def _example(named: Mapping[str, nn.Module]) -> str:
    return next((name for name, m in named.items() if isinstance(m, nn.Linear)), next(iter(named), ""))
