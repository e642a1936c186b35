"""Which attention answers a layer: a kernel, one that crosses processes, or one whose keys come from the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor

from lightning_memo.engine.block_reader import BlockReader
from lightning_memo.engine.memory import SlotMemory
from lightning_memo.engine.streamed_attention import StreamedAttention, UlyssesCore
from lightning_memo.kernels import AttentionBackend, AttentionSpec, select_backend
from lightning_memo.parallel.context import ContextAttention, ContextGroups
from lightning_memo.parallel.ulysses import HeadExchange
from lightning_memo.planner.slices import TokenRange

# Keys and values that come from the host at once: a kernel call should have work for a whole GPU, and a copy be worth
# its launch.
BLOCK_TOKENS = 2048


class AttentionKernels:
    """Attention of a run.

    Args:
        choice: Wished kernel.
        context: Processes that share the tokens of a sequence, if several do.
        sliced: Whether they share each slice.
    """

    def __init__(self, choice: str, context: ContextGroups | None, sliced: bool) -> None:
        self._select = functools.partial(select_backend, choice=choice)
        self._context = context
        self._sliced = sliced
        self.block_tokens = BLOCK_TOKENS

    def backend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionBackend:
        """For these tensors, which are all tokens or, context-parallel, this process's."""
        if self._context is not None:
            return ContextAttention(self._context, self._select, self._sliced)
        return self._select(q, k, v, spec)

    def streamed(
        self, slices: Sequence[TokenRange], reader: BlockReader, host: SlotMemory | None
    ) -> StreamedAttention | UlyssesCore:
        """For slices of this process's tokens, one after the other, with earlier keys and values from the host.

        Args:
            slices: The slices.
            reader: Brings blocks.
            host: Where gradients of keys and values meet; `None`: on the device.
        """
        groups = self._context or ContextGroups()
        slices = [part.gathered(groups.ulysses_size) for part in slices]
        kernel = groups.ring_kernel(self._select, tuple(part.stop for part in slices))
        core = StreamedAttention(kernel, slices, reader, host, self.block_tokens, groups.ring_size)
        return core if groups.ulysses is None else UlyssesCore(HeadExchange(groups.ulysses), core)
