"""Slices of tokens that run through a layer one after the other: what they keep, as the planner reckons it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.artifacts.swap_plan import HostBacked, StreamedBytes
from lightning_memo.estimate.inputs.precision_bytes import ElementBytes
from lightning_memo.estimate.memory.activations import saved_tensors
from lightning_memo.planner.alpha.streamed_sizes import streamed_sizes
from lightning_memo.planner.token_slices import SavedBytes, slice_tokens_by_alpha
from lightning_memo.shapes.model_shape import Kernels, ModelShape

_KINDS: Final = {"input": "input", "query": "query", "key": "key", "value": "value"} | {
    "attention output": "out",
    "log-sum-exp": "lse",
}
_FP32, _INT64 = 4, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """Settings of `MemoStrategy` by which layers run slice after slice.

    Raises:
        ValueError: no token.
    """

    tokens: int
    """`slice_tokens`: most tokens that run through a layer at once."""

    host_backed: HostBacked = "attention"
    schedule: Literal["layer", "slice"] = "layer"

    def __post_init__(self) -> None:
        check_range(self, {"tokens": 1})

    def __str__(self) -> str:
        backed = "schedule=slice" if self.schedule == "slice" else f"host_backed={self.host_backed}"
        return f"slice_tokens={self.tokens} {backed}"

    def key_value_gradient_bytes(self, shape: ModelShape) -> int:
        """Of a token: they are added up in fp32."""
        return 2 * shape.kv_heads * shape.head_dim * _FP32

    @property
    def states_on_host(self) -> bool:
        """Whether hidden states between layers are on the host, and what layers read is made slice by slice."""
        return self.host_backed == "all" and self.schedule == "layer"

    def kept_tables_bytes(self, shape: ModelShape, sizes: ElementBytes) -> int:
        """Of a token: tables of positions that each layer keeps for itself."""
        return tables_bytes(shape, sizes) if self.states_on_host else 0

    def streamed_bytes(
        self, shape: ModelShape, *, kernels: Kernels, sizes: ElementBytes, tokens: int, alpha: float
    ) -> StreamedBytes:
        """Bytes by the code that training asks.

        Args:
            shape: the model.
            kernels: see there.
            sizes: of elements.
            tokens: of the sequence.
            alpha: fraction of the tokens of which everything is swapped.
        """
        saved = list(saved_bytes(shape, kernels=kernels, sizes=sizes, tokens=self.tokens))
        shared = [tables_bytes(shape, sizes) // 2] * 2 + [_INT64] * 2
        if self.states_on_host:
            saved += [SavedBytes("other", self.tokens * size) for size in shared[:2]]
        return streamed_sizes(
            [(saved, self.tokens)] * shape.layers,
            slice_tokens_by_alpha(tokens, alpha, self.tokens),
            self.host_backed,
            gradient_bytes=self.key_value_gradient_bytes(shape),
            schedule=self.schedule,
            shared=[SavedBytes("shared", self.tokens * size) for size in shared],
        )


def saved_bytes(shape: ModelShape, *, kernels: Kernels, sizes: ElementBytes, tokens: int) -> Iterator[SavedBytes]:
    """What a layer keeps, as the planner takes it.

    Args:
        shape: the model.
        kernels: see there.
        sizes: of elements.
        tokens: of the layer's input.
    """
    for tensor in saved_tensors(shape, kernels=kernels, sizes=sizes):
        yield SavedBytes(_KINDS.get(tensor.name, "other"), tokens * tensor.bytes_per_token)


def tables_bytes(shape: ModelShape, sizes: ElementBytes) -> int:
    """Of a token: cosines and sines of its position, which layers keep where they are made slice by slice."""
    return 2 * shape.head_dim * sizes.stream
