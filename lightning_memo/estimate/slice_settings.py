"""Settings for layers that run slice by slice, and the memory of the slices as the planner computes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.artifacts.swap_plan import StoragePlan, StreamFromHost
from lightning_memo.estimate.saved_tensors import FP32, ElementBytes, saved_tensors
from lightning_memo.planner.streamed_bytes import StreamedBytes, streamed_bytes
from lightning_memo.planner.token_slices import SavedBytes, slices_of
from lightning_memo.shapes.model_shape import ModelShape

_ROLES: Final = {"input": "input", "query": "query", "key": "key", "value": "value"} | {
    "attention output": "out",
    "log-sum-exp": "lse",
}
_INT64 = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Slices:
    """Settings of `MemoStrategy` for layers that run slice by slice.

    Raises:
        ValueError: The number of tokens is below 1.
    """

    tokens: int
    """`slice_tokens`: maximum number of tokens that run through a layer at once."""

    stream_from_host: StreamFromHost = "attention"

    def __post_init__(self) -> None:
        check_range(self, {"tokens": 1})

    def __str__(self) -> str:
        return f"slice_tokens={self.tokens} stream_from_host={self.stream_from_host}"

    def key_value_gradient_bytes(self, shape: ModelShape) -> int:
        """Bytes per token of the gradients of keys and values, which are accumulated in fp32."""
        return 2 * shape.kv_heads * shape.head_dim * FP32

    @property
    def states_on_host(self) -> bool:
        """Whether hidden states between layers are on the host, and layers compute their tables slice by slice."""
        return self.stream_from_host == "hidden"

    def kept_tables_bytes(self, shape: ModelShape, sizes: ElementBytes) -> int:
        """Bytes per token of the position tables that each layer saves for itself."""
        return tables_bytes(shape, sizes) if self.states_on_host else 0

    def streamed_bytes(
        self,
        shape: ModelShape,
        *,
        sizes: ElementBytes,
        plan: StoragePlan,
    ) -> StreamedBytes:
        """Return the sizes of host and staging buffers, by the code that training uses.

        Args:
            shape: Shape of the model.
            sizes: Sizes of elements.
            plan: The plan.
        """
        saved = list(saved_bytes(shape, sizes=sizes, tokens=self.tokens))
        shared = [tables_bytes(shape, sizes) // 2] * 2 + [_INT64] * 2
        if self.states_on_host:
            saved += [SavedBytes("other", self.tokens * size) for size in shared[:2]]
        return streamed_bytes(
            [(saved, self.tokens)] * shape.layers,
            slices_of(plan, 0, plan.tokens),
            self.stream_from_host,
            gradient_bytes=self.key_value_gradient_bytes(shape),
            shared=[SavedBytes("shared", self.tokens * size) for size in shared],
            segments=plan.segments,
        )


def saved_bytes(
    shape: ModelShape,
    *,
    sizes: ElementBytes,
    tokens: int,
    tensor_parallel: int = 1,
) -> Iterator[SavedBytes]:
    """Yield the tensors that a layer saves, in the form that the planner takes.

    Args:
        shape: Shape of the model.
        sizes: Sizes of elements.
        tokens: Number of tokens in the layer's input.
        tensor_parallel: Number of tensor-parallel devices.
    """
    for tensor in saved_tensors(shape, sizes=sizes, tensor_parallel=tensor_parallel):
        yield SavedBytes(_ROLES.get(tensor.name, "other"), tokens * tensor.bytes_per_token)


def tables_bytes(shape: ModelShape, sizes: ElementBytes) -> int:
    """Return the bytes per token of the cosines and sines of positions."""
    return 2 * shape.head_dim * sizes.stream
