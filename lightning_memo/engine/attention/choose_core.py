"""Which attention answers a layer: a kernel, one that crosses processes, or one whose keys come from the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_memo.artifacts.plan import AttentionTrial
from lightning_memo.artifacts.swap_plan import Attention
from lightning_memo.engine.attention.streamed_core import StreamedAttention, UlyssesCore
from lightning_memo.engine.copies.clock import Clock
from lightning_memo.engine.memory.block_reader import BlockReader
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.kernels import AttentionBackend, AttentionSpec, select_backend
from lightning_memo.kernels.select_kernel import candidates, check_available
from lightning_memo.kernels.time_kernels import Cost, ProbeInputs, agreed, fastest, try_kernels
from lightning_memo.parallel.context.context_groups import ContextAttention, ContextGroups
from lightning_memo.parallel.context.ulysses_attention import HeadExchange
from lightning_memo.parallel.rank_groups import Ranks
from lightning_memo.planner.alpha.streamed_sizes import BLOCK_TOKENS
from lightning_memo.planner.token_slices import TokenRange


class AttentionKernels:
    """Attention of a run: one kernel for all its layers and processes.

    Args:
        wished: The kernel, or "auto": the fastest of those that compute calls like the model's, found out by trying.
        context: Processes that share the tokens of a sequence, if several do.
        sliced: Whether they share each slice.
        ranks: Processes that have to agree on a kernel.
        seconds_of: Measures a trial; `None`: the device's clock.

    Attributes:
        chosen: The kernel; `None` as long as nothing was chosen.
        trials: What it was chosen from.
    """

    def __init__(
        self,
        wished: Attention | Literal["auto"],
        context: ContextGroups | None = None,
        sliced: bool = False,
        ranks: Ranks | None = None,
        seconds_of: Cost | None = None,
    ) -> None:
        self._wished = wished
        self._context = context
        self._sliced = sliced
        self._ranks = ranks or Ranks()
        self._seconds_of = seconds_of
        self._is_choosing = False
        self.chosen: Attention | None = None
        self.trials: tuple[AttentionTrial, ...] = ()
        self.block_tokens = BLOCK_TOKENS

    @contextlib.contextmanager
    def choosing(self) -> Iterator[None]:
        """Inside, the first call for a kernel chooses one, if none is in force.

        All processes come here at once, in the first step that is profiled: later ones are not profiled by all.
        """
        self._is_choosing = self.chosen is None
        try:
            yield
        finally:
            self._is_choosing = False

    def use(self, attention: Attention) -> None:
        """Take the kernel of a plan."""
        self.chosen = attention

    def why_not(self, attention: Attention) -> str:
        """Why the kernel of a plan, made elsewhere, can't be used; empty if it can."""
        if self._wished not in ("auto", attention):
            return f'it was made for attention="{attention}", and "{self._wished}" is wished for'
        try:
            check_available(attention)
        except ValueError as missing:
            return str(missing)
        return ""

    def backend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionBackend:
        """For these tensors, which are all tokens or, context-parallel, this process's.

        Raises:
            ValueError: No kernel runs, or the one that is wished for does not.
        """
        if self._is_choosing:
            self._is_choosing = False
            self._choose(q, k, v, spec)
        if self._context is not None:
            return ContextAttention(self._context, self._select, self._sliced)
        return self._select(q, k, v, spec)

    def _select(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionBackend:
        return select_backend(q, k, v, spec, self.chosen or self._wished)

    def _choose(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        self.trials = agreed(self._ranks.gather(self._tried(q, k, v, spec)))
        if self._wished == "auto":
            self.chosen = fastest(self.trials) if self.trials else "sdpa"
            return
        for trial in self.trials if len(self.trials) > 1 else ():  # a single one could not be tried
            if trial.name == self._wished and trial.why_not:
                raise ValueError(f'attention="{trial.name}" does not work here ({trial.why_not}): use attention="auto"')
        self.chosen = self._wished

    def _tried(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[AttentionTrial, ...]:
        """Trials of this process: of all kernels, or of PyTorch's own and the wished one."""
        makers = candidates(q, k, v, spec)
        if self._wished != "auto":
            if self._wished not in makers:
                shape = "x".join(map(str, (q.shape[1], k.shape[1], q.shape[3])))
                why_not = f"it does not compute {q.dtype} of {shape} (heads, key heads, head size) on {q.device.type}"
                return () if self._wished == "sdpa" else (AttentionTrial(name=self._wished, why_not=why_not),)
            makers = {name: make for name, make in makers.items() if name in ("sdpa", self._wished)}
        if len(makers) < 2:
            return ()
        parts = 1 if self._context is None else self._context.ulysses_size
        inputs = ProbeInputs.like(q, k, v, spec, parts)
        return try_kernels(makers, inputs, self._seconds_of or _clock_of(q.device))

    def streamed(
        self, slices: Sequence[TokenRange], reader: BlockReader, host: SlotMemory | None, layer: int
    ) -> StreamedAttention | UlyssesCore:
        """For slices of this process's tokens, one after the other, with earlier keys and values from the host.

        Args:
            slices: The slices.
            reader: Brings blocks.
            host: Where gradients of keys and values meet; `None`: on the device.
            layer: Position of the layer.
        """
        groups = self._context or ContextGroups()
        slices = [part.gathered(groups.ulysses_size) for part in slices]
        kernel = groups.ring_kernel(self._select, tuple(part.stop for part in slices))
        core = StreamedAttention(kernel, slices, reader, host, self.block_tokens, groups.ring_size, layer)
        return core if groups.ulysses is None else UlyssesCore(HeadExchange(groups.ulysses), core)


def _clock_of(device: torch.device) -> Cost:
    clock = Clock(device)

    def seconds_of(work: Callable[[], object]) -> float:
        start = clock.now()
        work()
        return Clock.seconds(start, clock.now())

    return seconds_of
