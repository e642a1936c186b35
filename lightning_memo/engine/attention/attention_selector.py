"""Selection of the attention kernel of a run, and of the attention that runs it, of whole layers or from the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_memo.artifacts.swap_plan import Attention, AttentionTrial
from lightning_memo.engine.attention.sliced_attention import StreamedAttention, StreamedUlysses, attend
from lightning_memo.engine.memory.block_reader import BlockReader
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.timeline_recorder import Clock
from lightning_memo.kernels import AttentionBackend, AttentionSpec, select_backend
from lightning_memo.kernels.select_kernel import (
    ProbeInputs,
    Timer,
    agreed,
    candidate_kernels,
    check_available,
    fastest_kernel,
    try_kernels,
)
from lightning_memo.parallel.batches.token_layout import TokenLayout
from lightning_memo.parallel.context_parallel import ContextAttention, ContextGroups, HeadExchange
from lightning_memo.parallel.ranks import Ranks
from lightning_memo.planner.streamed_bytes import BLOCK_TOKENS
from lightning_memo.planner.token_slices import TokenRange


class AttentionSelector:
    """Selects the attention kernel of a run, the same for all layers and processes.

    Args:
        requested: Name of the kernel, or "auto" for the fastest one in trials of calls like the model's.
        context: Context-parallel groups, if several processes share the tokens of a sequence.
        sliced: Whether each slice is divided over these processes.
        ranks: Processes that must agree on a kernel.
        seconds_of: Times a trial; `None` uses the device's clock.

    Attributes:
        sliced: Whether each slice is divided over these processes.
        chosen: Name of the kernel; `None` until one has been chosen.
        trials: Results of the trials.
        block_tokens: Number of tokens of a block in streamed attention.
    """

    def __init__(
        self,
        requested: Attention | Literal["auto"],
        context: ContextGroups | None = None,
        sliced: bool = False,
        ranks: Ranks | None = None,
        seconds_of: Timer | None = None,
    ) -> None:
        self._requested = requested
        self._context = context
        self.sliced = sliced
        self._ranks = ranks or Ranks()
        self._seconds_of = seconds_of
        self._is_choosing = False
        self.chosen: Attention | None = None
        self.trials: tuple[AttentionTrial, ...] = ()
        self.block_tokens = BLOCK_TOKENS

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        """Inside this context, the first request for a kernel runs the trials, unless a kernel has been chosen.

        All processes enter it together in the first profiled step. Later steps are not profiled by all of them.
        """
        self._is_choosing = self.chosen is None
        try:
            yield
        finally:
            self._is_choosing = False

    def use(self, attention: Attention) -> None:
        """Use the kernel of a plan."""
        self.chosen = attention

    def why_not(self, attention: Attention) -> str:
        """Return why the kernel of a plan from elsewhere can't be used, or an empty text if it can."""
        if self._requested not in ("auto", attention):
            return f'it was made for attention="{attention}", but attention="{self._requested}" is set'
        try:
            check_available(attention)
        except ValueError as missing:
            return str(missing)
        return ""

    def backend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionBackend:
        """Return the kernel for queries, keys and values `[batch, heads, tokens, head_dim]`.

        With context parallelism, `tokens` are this process's tokens.

        Raises:
            ValueError: No kernel runs, or the requested one does not.
        """
        if self._is_choosing:
            self._is_choosing = False
            self._choose(q, k, v, spec)
        if self._context is not None:
            sliced = self.sliced and self._select(q, k, v, spec).blocks
            return ContextAttention(self._context, self._select, sliced)
        return self._select(q, k, v, spec)

    def _select(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionBackend:
        return select_backend(q, k, v, spec, self.chosen or self._requested)

    def _choose(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        self.trials = agreed(self._ranks.gather(self._try(q, k, v, spec)))
        if self._requested == "auto":
            self.chosen = fastest_kernel(self.trials) if self.trials else "sdpa"
            return
        for trial in self.trials if len(self.trials) > 1 else ():  # a single entry is a kernel that could not be tried
            if trial.name == self._requested and trial.why_not:
                raise ValueError(f'attention="{trial.name}" does not work here ({trial.why_not}): use attention="auto"')
        self.chosen = self._requested

    def _try(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[AttentionTrial, ...]:
        """Run this process's trials: of all kernels, or of PyTorch's own and the requested one."""
        kernels = candidate_kernels(q, k, v, spec)
        if self._requested != "auto":
            if self._requested not in kernels:
                shape = "x".join(map(str, (q.shape[1], k.shape[1], q.shape[3])))
                why_not = f"it does not compute {q.dtype} of {shape} (heads, key heads, head size) on {q.device.type}"
                return () if self._requested == "sdpa" else (AttentionTrial(name=self._requested, why_not=why_not),)
            kernels = {name: make for name, make in kernels.items() if name in ("sdpa", self._requested)}
        if len(kernels) < 2:
            return ()
        parts = 1 if self._context is None else self._context.ulysses_size
        inputs = ProbeInputs.like(q, k, v, spec, parts)
        return try_kernels(kernels, inputs, self._seconds_of or _clock_of(q.device))

    def streamed(
        self, slices: Sequence[TokenRange], reader: BlockReader, host: SlotMemory | None
    ) -> StreamedAttention | StreamedUlysses:
        """Return the streamed attention of a layer, which reads earlier keys and values from the host.

        Args:
            slices: The slices of this process's tokens, in order.
            reader: Reads blocks of keys and values.
            host: Memory for the gradients of keys and values; `None` keeps them on the device.
        """
        groups = self._context or ContextGroups()
        slices = [part.gathered(groups.ulysses_size) for part in slices]
        kernel = groups.ring_kernel(self._select, tuple(part.stop for part in slices))
        core = StreamedAttention(kernel, slices, reader, host, self.block_tokens, groups.ring_size)
        return core if groups.ulysses is None else StreamedUlysses(HeadExchange(groups.ulysses), core)


class WholeAttention:
    """Answers the attention calls of layers without gradients, and of all layers of a plain plan.

    The other layers of a step may run in slices. Tokens that are gathered from sequence-parallel shards are then in
    another order than attention needs.

    Args:
        selector: Selects attention kernels.
        layout: The layout of the batch; `None` if no batch was divided.
    """

    def __init__(self, selector: AttentionSelector, layout: TokenLayout | None) -> None:
        self._selector = selector
        self._layout = layout if layout is not None and layout.shards > 1 and len(layout.bounds) > 1 else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """Return the output, `[batch, heads, tokens, head_dim]`, of tokens in the order in which they were gathered."""
        layout = self._layout
        if layout is not None:
            q, k, v = (layout.as_attended(t, 2) for t in (q, k, v))
        out = attend(self._selector.backend(q, k, v, spec), q, k, v, spec)
        return out if layout is None else layout.as_fed(out, 2)


def _clock_of(device: torch.device) -> Timer:
    clock = Clock(device)

    def seconds_of(work: Callable[[], object]) -> float:
        start = clock.now()
        work()
        return Clock.seconds(start, clock.now())

    return seconds_of
