"""Offload groups: saved tensors of a layer call, or of one of its slices, that leave and come back together."""

from __future__ import annotations

import sys
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import torch
from torch import Tensor

from lightning_memo.artifacts.costs import Place
from lightning_memo.engine.memory.host import HostRange
from lightning_memo.engine.memory.saved_storages import NotedTensor, Registry, flat
from lightning_memo.engine.memory.slot_memory import Slot, SlotMemory, SlotView
from lightning_memo.engine.saved_tensors.call_arguments import OffloadedArgument, WeightCopy
from lightning_memo.engine.saved_tensors.wrapper_subclasses import WrappedHandle
from lightning_memo.parallel.local_tensors import ShardedHandle

Member = TypeVar("Member")

ALL_POSITIONS: Final = range(sys.maxsize)
"""The positions of the objects of a step, unless several micro-batches share them."""

# The handle of a saved tensor: the tensor itself or a copy (if it stays on the device), with its version if others may
# change it, its place in the slot, its place in an argument that layers share, the weight of which it is a copy, the
# handles of its parts, or its number in a recomputation.
Handle = Tensor | SlotView | ShardedHandle | NotedTensor | OffloadedArgument | WeightCopy | WrappedHandle | int


class ForwardOrder(Generic[Member]):
    """The objects that are alive, by position. An object that nothing else refers to leaves by itself.

    Objects of several micro-batches may be alive at once, each with a range of positions of its own. No operation takes
    longer if more objects are alive.
    """

    def __init__(self) -> None:
        self._alive: weakref.WeakValueDictionary[int, Member] = weakref.WeakValueDictionary()
        self._positions = ALL_POSITIONS
        self._taken: defaultdict[range, list[int]] = defaultdict(list)  # ascending; some objects may have left

    def __len__(self) -> int:
        return len(self._alive)

    def __iter__(self) -> Iterator[Member]:
        return iter([member for _, member in sorted(self._alive.items())])

    def begin(self, positions: range) -> None:
        """Let the objects that are added from now on have these positions, until this method is called again."""
        self._positions = positions

    @property
    def next_key(self) -> int:
        """The position of an object that begins now: behind those that are alive."""
        taken = self._taken[self._positions]
        while taken and taken[-1] not in self._alive:
            taken.pop()
        return taken[-1] + 1 if taken else self._positions.start

    def add(self, key: int, member: Member) -> None:
        """Add an object that begins, at the next position."""
        self._taken[self._positions].append(key)
        self._alive[key] = member

    def remove(self, key: int, member: Member) -> None:
        """Remove an object that has ended."""
        if self._alive.get(key) is member:
            del self._alive[key]

    def before(self, key: int) -> Member | None:
        """Return the object before a position, which the backward needs next; `None` if there is none."""
        return self._alive.get(key - 1) if key - 1 in self._positions else None

    def clear(self) -> None:
        """Forget all objects of an interrupted step."""
        self._alive.clear()


class OffloadGroup:
    """A slot, and the tensors that were put into it.

    Args:
        groups: Brings groups back in the order of the backward.
        key: Position among the groups that are alive, in the order of the forward.
        memory: The memory in which the slot is leased; `None` if all tensors stay on the device.
        swap: Whether the slot leaves the device.
        sizes: Bytes of the slot that go to places other than the host.

    Attributes:
        slot: The slot; `None` if all tensors stay on the device.
    """

    def __init__(
        self,
        groups: OffloadGroups,
        key: int,
        memory: SlotMemory | None,
        swap: bool,
        sizes: Mapping[Place, int] | None = None,
    ) -> None:
        self.key = key
        self.slot = None if memory is None else memory.lease(key, swap, sizes)
        self._groups = groups
        self._memory = memory
        self._registry: Registry[SlotView] = Registry()
        self._started = False
        # A graph that is dropped without a backward gives its slot back too.
        self._release = weakref.finalize(self, _release_slot, memory, self.slot)
        self._release.atexit = False

    @property
    def alive(self) -> bool:
        """Whether the group holds its tensors."""
        return self._release.alive

    def put(self, t: Tensor, place: Place = "host") -> Handle:
        """Copy a tensor into the slot, and return its handle. Without space in a slot, it stays on the device.

        Args:
            t: The tensor.
            place: Where the tensor goes.
        """
        if self.slot is None or t.numel() == 0:
            return t
        stored = self.slot.put(t, place)
        if stored is None:
            if self._memory is not None:
                self._memory.stats.overflow_bytes += t.nbytes
            return t
        self._registry.add(t, stored)
        return stored

    def find(self, t: Tensor) -> Handle | None:
        """Return the handle of a tensor whose bytes are in the slot already; `None` if they are not."""
        known = self._registry.find(t)
        return None if known is None else known[0].view_like(t, known[1])

    def load(self, handle: Handle) -> Tensor:
        """Return a tensor on the device, in the backward. The whole group comes back at once."""
        if isinstance(handle, Tensor):
            return handle
        if isinstance(handle, NotedTensor):
            return handle.unchanged("a layer")
        if isinstance(handle, ShardedHandle):
            return handle.wrap(self.load(handle.local))
        if isinstance(handle, WrappedHandle):
            return handle.wrap(self.load)
        self.begin_backward()
        return self.peek(handle)

    def peek(self, handle: Handle) -> Tensor:
        """Return a tensor while the forward still runs."""
        if isinstance(handle, Tensor):
            return handle
        assert isinstance(handle, SlotView) and self.slot is not None
        return self.slot.load(handle)

    def host_range(self, handle: Handle) -> HostRange:
        """Return where the bytes of a tensor are after it has left the device."""
        if isinstance(handle, Tensor):
            return HostRange(handle.nbytes, flat(handle).view(torch.uint8))
        assert isinstance(handle, SlotView) and self.slot is not None
        return self.slot.host_range(handle)

    def end_forward(self) -> None:
        """Move all tensors off the device; no more are put, and none is needed there until the backward."""
        if self._memory is not None and self.slot is not None:
            self._memory.offload(self.slot)
        self._registry.clear()

    def begin_backward(self) -> None:
        """Bring the slot back, and start bringing back the group that is needed next."""
        if not self._started and self._memory is not None and self.slot is not None:
            self._started = True
            self._groups.fetch(self, self._memory)

    def rewind(self) -> None:
        """End a backward that another one may follow: others may take the place of the slot on the device."""
        if self._started and self._memory is not None and self.slot is not None:
            self._memory.rest(self.slot)
        self._started = False

    def release(self) -> None:
        """Give the slot back; later use of the group raises."""
        self._groups.remove(self.key, self)
        self._release()


class OffloadGroups(ForwardOrder[OffloadGroup]):
    """The offload groups that are alive, in the order of the forward; the backward needs them in reverse order."""

    def open(self, memory: SlotMemory | None, swap: bool, sizes: Mapping[Place, int] | None = None) -> OffloadGroup:
        """Return a new group behind those that are alive; see :class:`OffloadGroup` for the arguments."""
        group = OffloadGroup(self, self.next_key, memory, swap, sizes)
        self.add(group.key, group)
        return group

    def fetch(self, group: OffloadGroup, memory: SlotMemory) -> None:
        """Bring a group to the device, and start bringing the one that the backward needs next."""
        assert group.slot is not None
        memory.fetch(group.slot, group.key)
        group.slot.in_backward = True
        following = self.before(group.key)
        if following is not None and following.slot is not None:
            memory.fetch(following.slot, following.key, ahead=True)

    def release(self) -> None:
        """Give back the slots of all groups, after an interrupted step."""
        for group in self:
            group.release()
        self.clear()


@dataclass(frozen=True, slots=True)
class KeysValues:
    """Keys and values of a slice, stored in an offload group."""

    group: OffloadGroup
    key: Handle
    value: Handle

    def peek(self) -> tuple[Tensor, Tensor]:
        """Return them while the forward still runs."""
        return self.group.peek(self.key), self.group.peek(self.value)

    def end_forward(self) -> None:
        """The group drops what only the forward needs."""

    def load(self) -> tuple[Tensor, Tensor]:
        """Return them on the device, in the backward."""
        return self.group.load(self.key), self.group.load(self.value)

    def host_ranges(self) -> tuple[HostRange, HostRange]:
        """Return where they are on the host."""
        return self.group.host_range(self.key), self.group.host_range(self.value)


def _release_slot(memory: SlotMemory | None, slot: Slot | None) -> None:
    if memory is not None and slot is not None:
        memory.release(slot)
