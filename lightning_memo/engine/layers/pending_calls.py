"""The layer calls of a step whose backward has not ended, and the micro-batches that they belong to.

Note: [Micro-batches in flight]
A pipeline stage runs the forwards of several micro-batches before the backward of the first one, and then a forward and
a backward in turn. A plan has a range of layer calls for each micro-batch in flight: call `m * n + i` is layer `i` of
the `n` layers, for a micro-batch whose number leaves the remainder `m`. A micro-batch takes the range, with its host
slots, of the one whose backward has ended. Rounding buffers are shared: all slots of a forward leave the device, so
that the backward of another micro-batch can fetch its own.

A stage may have several blocks of layers, between which a micro-batch passes through other stages. Each block has its
own number of micro-batches in flight, and so its own ranges, behind those of the blocks before it.
"""

from __future__ import annotations

import itertools
import weakref

from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.saved_tensors.offload_group import ALL_POSITIONS, ForwardOrder, OffloadGroups
from lightning_memo.utils.around_forward import is_in_backward


class PendingCalls(ForwardOrder[object]):
    """Layer calls in the order of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self._in_backward: weakref.WeakSet[object] = weakref.WeakSet()

    @property
    def interrupted(self) -> bool:
        """Whether an exception ended a backward half-way. PyTorch keeps the rest of its graph until the next step."""
        return bool(self._in_backward) and not is_in_backward()

    def begin_backward(self, call: object) -> None:
        """The backward of a call begins."""
        self._in_backward.add(call)

    def leave_backward(self, call: object) -> None:
        """The backward of a call ends, or a backward that does not need the rest of the call does."""
        self._in_backward.discard(call)

    def clear(self) -> None:
        super().clear()
        self._in_backward.clear()


class MicroBatches:
    """Gives the layer calls of each micro-batch in flight their positions.

    Args:
        calls: The layer calls that are alive.
        groups: Their offload groups.

    Attributes:
        in_flight: For each block of layers, the largest number of micro-batches whose layer calls are alive at once;
            `None` without a pipeline.
        waiting: Largest number of backwards whose gradients of weights wait at once.
        waiting_bytes: Memory of what one of them leaves for these gradients.
    """

    def __init__(self, calls: PendingCalls, groups: OffloadGroups) -> None:
        self.in_flight: tuple[int, ...] | None = None
        self.waiting = self.waiting_bytes = 0
        self._first_calls: dict[int, int] = {}
        self._calls_of: list[int] = []
        self._calls, self._groups = calls, groups

    @property
    def are_counted(self) -> bool:
        """Whether the layer calls of each block are known, which is so after the first batch."""
        return bool(self._calls_of)

    def begin_alone(self, block: int, backward: bool) -> None:
        """Begin the forward or the backward of a micro-batch, while no other one is in flight.

        Args:
            block: Number of the block of layers.
            backward: Whether the backward begins.
        """
        self._begin(ALL_POSITIONS)
        if not backward:
            self._first_calls[block] = self._calls.next_key

    def repeat(self, profile: StepProfile) -> None:
        """Let the profile of a micro-batch that ran alone stand for all in flight."""
        assert self.in_flight is not None
        stops = [*(self._first_calls[block] for block in range(len(self.in_flight))), len(profile.calls)]
        self._calls_of = [stop - start for start, stop in itertools.pairwise(stops)]
        profile.repeat(zip(self._calls_of, self.in_flight, strict=True))

    def begin(self, number: int, block: int, swap: SwapPlan | None) -> None:
        """Begin or continue the forward or the backward of a micro-batch through a block of layers.

        Args:
            number: Number of the micro-batch in its batch. Micro-batches end in the order in which they began.
            block: Number of the block of layers.
            swap: The plan by which its layers run.
        """
        positions = ALL_POSITIONS
        if swap is not None and self.in_flight is not None:
            before = sum(c * n for c, n in zip(self._calls_of[:block], self.in_flight, strict=False))
            calls, lane = self._calls_of[block], number % self.in_flight[block]
            positions = range(before + lane * calls, before + (lane + 1) * calls)
        self._begin(positions)

    def _begin(self, positions: range) -> None:
        self._calls.begin(positions)
        self._groups.begin(positions)
