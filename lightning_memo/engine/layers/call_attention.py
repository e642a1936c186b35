"""The attention of one layer call: a core for each of the layer's attention calls."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_memo.engine.attention.sliced_attention import SlicedAttention, StreamedAttention, StreamedUlysses
from lightning_memo.engine.layers.engine_services import EngineServices
from lightning_memo.kernels import AttentionSpec
from lightning_memo.planner.token_slices import TokenRange

Core = SlicedAttention | StreamedAttention | StreamedUlysses


class CallAttention:
    """Attention cores of a layer, which the slices of a sequence share.

    Args:
        engine: Provides kernels.
        slices: The slices of the sequence as attention sees them.
        streamed: Whether keys and values of earlier slices come from the host.
        cores: The cores that earlier slices have made; `None` if there are no earlier slices.

    Attributes:
        slices: The slices of the sequence as attention sees them.
        cores: The cores, in the order of the layer's attention calls.
    """

    def __init__(
        self,
        engine: EngineServices,
        slices: Sequence[TokenRange],
        streamed: bool,
        cores: list[Core] | None = None,
    ) -> None:
        self._engine, self._streamed = engine, streamed
        self.slices = tuple(slices)
        self.cores: list[Core] = [] if cores is None else cores

    def core(self, number: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Core:
        """Return the core of the attention call `number`; all slices make their calls in the same order."""
        if number == len(self.cores):
            if self._streamed:
                self.cores.append(self._engine.streamed_attention(self.slices))
            else:
                self.cores.append(SlicedAttention(self._engine.attention.backend(q, k, v, spec), self.slices))
        return self.cores[number]

    def end_forward(self) -> None:
        """No slice runs before the backward."""
        for core in self.cores:
            if isinstance(core, SlicedAttention):
                core.end_forward()

    def rewind(self) -> None:
        """End a backward that another one may follow."""
        for core in self.cores:
            core.rewind()

    def release(self) -> None:
        """Give back the memory that the cores hold."""
        while self.cores:
            self.cores.pop().release()
