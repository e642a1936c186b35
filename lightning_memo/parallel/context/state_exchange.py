"""Sends the states of recurrences from process to process, and their gradients back."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateShape:
    """What a state is, without its values."""

    size: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, t: Tensor) -> StateShape:
        return cls(t.shape, t.dtype, t.device, t.requires_grad)

    def zeros(self) -> Tensor:
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class StateLink:
    """A process from which states come, or to which they go, and the group in which they are sent."""

    group: dist.ProcessGroup
    rank: int


class StateExchange:
    """Point-to-point messages between the processes that share the tokens of a sequence.

    All processes make the same calls in the same order, so that messages need neither numbers nor shapes. Nothing else
    is sent in these groups. NCCL sends what two ranks of a group send each other one after the other: states from the
    last rank to the first have a group of their own, so that two ranks do not wait for each other.

    Args:
        onward: The processes, in the order of their tokens.
        around: The same processes, for the states that go from the last one to the first.
    """

    def __init__(self, onward: dist.ProcessGroup, around: dist.ProcessGroup) -> None:
        self._onward, self._around = onward, around
        self._size, self._rank = dist.get_world_size(onward), dist.get_rank(onward)
        self._sent: list[tuple[dist.Work, Tensor]] = []
        self._shapes: dict[Hashable, StateShape] = {}

    def before(self, first: bool, by_slice: bool) -> StateLink | None:
        """Return the process that has the state at the start of a slice; `None` if this one has it, or there is none.

        Args:
            first: Whether the slice is the first one of this process.
            by_slice: Whether processes share the tokens of every slice. Otherwise, each has its own slices.
        """
        if self._rank > 0 and (first or by_slice):
            return StateLink(self._onward, self._rank - 1)
        return StateLink(self._around, self._size - 1) if by_slice and not first else None

    def after(self, last: bool, by_slice: bool) -> StateLink | None:
        """Return the process that needs the state at the end of a slice; `None` if this one needs it, or none does.

        Args:
            last: Whether the slice is the last one of this process.
            by_slice: As for :meth:`before`.
        """
        if self._rank < self._size - 1 and (last or by_slice):
            return StateLink(self._onward, self._rank + 1)
        return StateLink(self._around, 0) if by_slice and not last else None

    def send(self, t: Tensor, link: StateLink) -> None:
        """Begin to send a tensor to another process."""
        t = t.contiguous()
        if t.numel() and (work := dist.isend(t, group=link.group, group_dst=link.rank)) is not None:
            self._sent.append((work, t))  # which must live until it is sent

    def receive(self, shape: StateShape, link: StateLink) -> Tensor:
        """Return a tensor from another process."""
        t = torch.empty(shape.size, dtype=shape.dtype, device=shape.device)
        if t.numel():
            dist.recv(t, group=link.group, group_src=link.rank)
        return t

    def settle(self) -> None:
        """Wait until everything has been sent.

        At the end of a layer, this takes no time: the receiver is one recurrence behind.
        """
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def shape_of(self, form: Hashable, find: Callable[[], StateShape]) -> StateShape:
        """Return what `find` has returned for the first call of a form."""
        if form not in self._shapes:
            self._shapes[form] = find()
        return self._shapes[form]
