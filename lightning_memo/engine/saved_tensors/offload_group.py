"""Offload groups: saved tensors of a layer call, or of one of its slices, that move to the host and back together."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from lightning_memo.artifacts.swap_plan import SlotSize
from lightning_memo.engine.memory.block_reader import HostRange
from lightning_memo.engine.memory.checksums import SlotChecksums
from lightning_memo.engine.memory.saved_storages import KeptTensor, Registry, flat
from lightning_memo.engine.memory.slot import Slot, SlotView
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.saved_tensors.parked_arguments import ParkedView
from lightning_memo.engine.saved_tensors.weight_copies import WeightCopy
from lightning_memo.engine.saved_tensors.wrapper_subclasses import WrappedHandle
from lightning_memo.parallel.local_tensors import ShardedHandle

# The handle of a saved tensor: the tensor itself or a copy (if it stays on the device), with its version if others may
# change it, its place in the slot, its place in an argument that layers share, the weight of which it is a copy, the
# handles of its parts, or its number in a recomputation.
Handle = Tensor | SlotView | ShardedHandle | KeptTensor | ParkedView | WeightCopy | WrappedHandle | int

ALL_POSITIONS: Final = range(sys.maxsize)
"""The positions of layer calls, and the numbers of offload groups, unless several micro-batches share them."""


class OffloadGroup:
    """A slot, and the tensors that were put into it.

    Args:
        groups: Brings groups back in the order of the backward.
        number: Position among the groups that are alive, in the order of the forward.
        memory: The memory in which the slot is leased; `None` if all tensors stay on the device.
        swap: Whether the slot leaves the device.
        size: Size of the slot; `None` for the largest.

    Attributes:
        slot: The slot; `None` if all tensors stay on the device.
        checks: Compares tensors that come back with what was put; `None` if they are not compared.
    """

    def __init__(
        self, groups: OffloadGroups, number: int, memory: SlotMemory | None, swap: bool, size: SlotSize | None = None
    ) -> None:
        self.number = number
        self.slot = None if memory is None else memory.lease(number, swap, size)
        checked = memory is not None and memory.check_restored and swap
        self.checks = SlotChecksums(self.slot) if checked and self.slot is not None else None
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

    def put(self, t: Tensor, spill: bool = False, compress: bool = False) -> Handle:
        """Copy a tensor into the slot, and return its handle. Without space in a slot, it stays on the device.

        Args:
            t: The tensor.
            spill: Whether the tensor goes to the disk instead of the host.
            compress: Whether it is compressed in the slot.
        """
        if self.slot is None or t.numel() == 0:
            return t
        stored = self.slot.put(t, spill, compress)
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
        if isinstance(handle, KeptTensor):
            return handle.unchanged("a layer")
        if isinstance(handle, ShardedHandle):
            return handle.wrap(self.load(handle.local))
        if isinstance(handle, WrappedHandle):
            return handle.wrap(self.load)
        self.begin_backward()
        t = self.peek(handle)
        if self.checks is not None:
            assert isinstance(handle, SlotView)
            self.checks.compare(handle)
        return t

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
        memory = self.slot.buffer if self.slot.host is None else self.slot.host
        assert memory is not None
        stop = handle.offset_bytes + handle.size_bytes
        checksum = None if self.checks is None else self.checks.of(handle)
        written = self.slot.to_host.arrival(stop)
        return HostRange(handle.size_bytes, memory[handle.offset_bytes : stop], written, self.slot.copies, checksum)

    def offload(self, last: bool = False) -> None:
        """Start moving the tensors that were put so far off the device.

        Args:
            last: Whether no more tensors are going to be put.
        """
        if self._memory is not None and self.slot is not None:
            self._memory.offload(self.slot, last)

    def end_forward(self) -> None:
        """Move all tensors off the device; no more are put, and none is needed there until the backward."""
        self.offload(last=True)
        self._registry.clear()

    def begin_backward(self) -> None:
        """Bring the slot back, and start bringing back the group that is needed next."""
        if not self._started and self._memory is not None and self.slot is not None:
            self._started = True
            self._groups.fetch(self, self._memory)

    def release(self) -> None:
        """Give the slot back; later use of the group raises."""
        self._groups.close(self)
        self._release()


class OffloadGroups:
    """The offload groups that are alive, in the order of the forward; the backward needs them in reverse order.

    Groups of several micro-batches may be alive at once, each with a range of numbers of its own.
    """

    def __init__(self) -> None:
        self._groups: weakref.WeakValueDictionary[int, OffloadGroup] = weakref.WeakValueDictionary()
        self._numbers = ALL_POSITIONS

    def __iter__(self) -> Iterator[OffloadGroup]:
        return iter([group for _, group in sorted(self._groups.items())])

    def begin(self, numbers: range) -> None:
        """Let the groups that are opened and fetched from now on have these numbers, until this is called again."""
        self._numbers = numbers

    def open(self, memory: SlotMemory | None, swap: bool, size: SlotSize | None = None) -> OffloadGroup:
        """Return a new group behind those that are alive; see :class:`OffloadGroup` for the arguments."""
        known = (number for number in list(self._groups) if number in self._numbers)
        group = OffloadGroup(self, max(known, default=self._numbers.start - 1) + 1, memory, swap, size)
        self._groups[group.number] = group
        return group

    def close(self, group: OffloadGroup) -> None:
        """Forget a group that gives its slot back."""
        if self._groups.get(group.number) is group:
            del self._groups[group.number]

    def fetch(self, group: OffloadGroup, memory: SlotMemory) -> None:
        """Bring a group to the device, and start bringing the one that the backward needs next."""
        assert group.slot is not None
        memory.fetch(group.slot, group.number)
        group.slot.in_backward = True
        number = group.number - 1
        following = self._groups.get(number) if number in self._numbers else None
        if following is not None and following.slot is not None:
            memory.fetch(following.slot, following.number, ahead=True)

    def release(self) -> None:
        """Give back the slots of all groups, after an interrupted step."""
        for group in self:
            group.release()
        self._groups.clear()


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
