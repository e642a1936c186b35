"""The two rounding buffers: device memory that the slots of consecutive layer calls use in turn (MEMO section 4.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memo.engine.memory.saved_storages import POISON
from lightning_memo.engine.memory.slot import Slot


class RoundingBuffers:
    """Two device buffers; layer calls `i` and `i + 2` share one.

    Args:
        size_bytes: Size of each buffer.
        device: Where the layers run.
        poison: Whether a buffer is filled with NaN when a slot leaves it.
    """

    def __init__(self, size_bytes: int, device: torch.device, poison: bool) -> None:
        self._device, self._poison = device, poison
        self._buffers: list[Tensor] = [torch.empty(size_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self._owners: list[Slot | None] = [None, None]

    @property
    def in_use(self) -> int:
        """Number of buffers that a slot occupies."""
        return sum(owner is not None for owner in self._owners)

    def occupant(self, t: Tensor) -> Slot | Tensor | None:
        """The slot in whose buffer a tensor lies, or the buffer if no slot occupies it; `None` outside of buffers."""
        storage = t.untyped_storage().data_ptr()
        for buffer, owner in zip(self._buffers, self._owners, strict=True):
            if buffer.untyped_storage().data_ptr() == storage:
                return buffer if owner is None else owner
        return None

    def is_free(self, call: int) -> bool:
        """Whether no slot occupies the buffer of a layer call."""
        return self._owners[call % 2] is None

    def enter(self, slot: Slot, call: int) -> bool:
        """Give a slot the rounding buffer of its layer call, once the slot that occupies it can leave.

        Returns:
            Whether the slot got the rounding buffer; otherwise it got newly allocated memory.
        """
        number = call % 2
        owner = self._owners[number]
        if owner is not None:
            if not owner.can_leave:
                slot.buffer = torch.empty(slot.capacity_bytes, dtype=torch.uint8, device=self._device)
                return False
            owner.wait_for_offload()
            self.leave(owner)
        self._owners[number] = slot
        slot.buffer, slot.rounding = self._buffers[number], number
        return True

    def leave(self, slot: Slot) -> None:
        """Take the device buffer from a slot."""
        if self._poison and slot.buffer is not None:
            slot.buffer.fill_(POISON)
        if slot.rounding is not None:
            self._owners[slot.rounding] = None
        slot.buffer = slot.rounding = None
