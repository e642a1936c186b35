"""What leaves for the host and comes back as one piece: what the slices of a layer call save, or one of them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_memo.engine.memory.block_reader import HostRange
from lightning_memo.engine.memory.checksums import SlotChecksums
from lightning_memo.engine.memory.saved_storages import Registry, flat
from lightning_memo.engine.memory.slot import Slot, SlotView
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.saved.parked_arguments import ParkedView
from lightning_memo.engine.saved.weight_copies import WeightCopy
from lightning_memo.engine.saved.wrapper_subclasses import WrappedHandle
from lightning_memo.parallel.local_tensors import ShardedHandle

if TYPE_CHECKING:
    from lightning_memo.engine.engine import Engine

# A saved tensor's handle: itself (weights, what stays on the device), its place in the slot or in what layers share,
# the weight that it is a copy of, those of its parts, or its number in a replay.
Handle = Tensor | SlotView | ShardedHandle | ParkedView | WeightCopy | WrappedHandle | int


class Unit:
    """A slot, and what was put into it.

    Args:
        engine: Brings units back in the order of the backward.
        number: Position among the units that are alive, in the order of the forward.
        memory: Where the slot is leased; `None` when all stays on the device.
        swap: Whether the slot leaves the device.
        spill_bytes: How much of it goes to the disk; the rest goes to the host.

    Attributes:
        checks: What tensors were that were put, where that is compared later.
    """

    def __init__(
        self, engine: Engine, number: int, memory: SlotMemory | None, swap: bool, spill_bytes: int = 0
    ) -> None:
        self.number = number
        self.slot = None if memory is None else memory.lease(number, swap, spill_bytes)
        checked = memory is not None and memory.check_restored and swap
        self.checks = SlotChecksums(self.slot) if checked and self.slot is not None else None
        self._engine = engine
        self._memory = memory
        self._registry: Registry[SlotView] = Registry()
        self._started = False
        # A graph that is dropped without a backward gives its slot back too.
        self._release = weakref.finalize(self, _release_slot, memory, self.slot)
        self._release.atexit = False

    @property
    def alive(self) -> bool:
        """Whether the unit holds what was put into it."""
        return self._release.alive

    def put(self, t: Tensor, spill: bool = False) -> Handle:
        """Copy a tensor into the slot; it stays on the device where there is no slot, or no room in it.

        Args:
            t: The tensor.
            spill: Whether it is to leave for the disk, rather than for the host.
        """
        if self.slot is None or t.numel() == 0:
            return t
        stored = self.slot.put(t, spill)
        if stored is None:
            self._engine.count_overflow(t.nbytes)
            return t
        self._registry.add(t, stored)
        return stored

    def find(self, t: Tensor) -> Handle | None:
        """The handle of a tensor whose bytes are in the slot already."""
        known = self._registry.find(t)
        return None if known is None else known[0].view_like(t, known[1])

    def load(self, handle: Handle) -> Tensor:
        """A tensor that was put, on the device; in the backward the whole unit comes back."""
        if isinstance(handle, Tensor):
            return handle
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
        """A tensor that was put, while the forward still runs."""
        if isinstance(handle, Tensor):
            return handle
        assert isinstance(handle, SlotView) and self.slot is not None
        return self.slot.load(handle)

    def host_range(self, handle: Handle) -> HostRange:
        """Where the bytes of a tensor that was put are, once it has left the device."""
        if isinstance(handle, Tensor):
            return HostRange(handle.nbytes, flat(handle).view(torch.uint8))
        assert isinstance(handle, SlotView) and self.slot is not None
        memory = self.slot.buffer if self.slot.host is None else self.slot.host
        assert memory is not None
        stop = handle.offset_bytes + handle.size_bytes
        region = HostRange(handle.size_bytes, memory[handle.offset_bytes : stop], self.slot.to_host.offload)
        if self.checks is not None:
            region.checksum = self.checks.of(handle)
        return region

    def offload(self, last: bool = False) -> None:
        """Start moving what was put so far off the device; `last`: nothing more is put."""
        if self._memory is not None and self.slot is not None:
            self._memory.offload(self.slot, last)

    def end_forward(self) -> None:
        """Nothing more is put, and nothing is needed on the device until the backward."""
        self.offload(last=True)
        self._registry.clear()

    def begin_backward(self) -> None:
        """Bring the slot back, and start bringing back the one that is needed next."""
        if not self._started and self._memory is not None and self.slot is not None:
            self._started = True
            self._engine.fetch(self, self._memory)

    def release(self) -> None:
        """Give the slot back; later use of it raises."""
        self._engine.close_unit(self)
        self._release()


@dataclass(frozen=True, slots=True)
class KeysValues:
    """Where a slice's keys and values are."""

    unit: Unit
    key: Handle
    value: Handle

    def peek(self) -> tuple[Tensor, Tensor]:
        """On the device, while the forward still runs."""
        return self.unit.peek(self.key), self.unit.peek(self.value)

    def load(self) -> tuple[Tensor, Tensor]:
        """On the device, in the backward."""
        return self.unit.load(self.key), self.unit.load(self.value)

    def end_forward(self) -> None:
        """The unit is still needed in the backward."""

    def host_ranges(self) -> tuple[HostRange, HostRange]:
        """On the host."""
        return self.unit.host_range(self.key), self.unit.host_range(self.value)


def _release_slot(memory: SlotMemory | None, slot: Slot | None) -> None:
    if memory is not None and slot is not None:
        memory.release(slot)
