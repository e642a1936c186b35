"""Places outside of the device to which saved tensors go: what all of them have in common, and their free space.

A place is a `Store`. The engine takes a `Room` in it for the bytes of a layer call, writes them, reads them back and
releases the room. `host.py` and `disk.py` are such places.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from lightning_memo.engine.copy_streams import CopyEvent
from lightning_memo.engine.timeline_recorder import Subject


class Room(ABC):
    """Space for some bytes in a place outside of the device."""

    @abstractmethod
    def write(self, source: Tensor, *, subject: Subject | None = None) -> CopyEvent:
        """Start copying bytes from the device, and return the end of the copies out of `source`.

        Args:
            source: The bytes, uint8, which must not be changed before they have left the device.
            subject: The layer call or slice that the bytes belong to, for the recorder; `None` is the one being
                computed.
        """

    @abstractmethod
    def read(self, destination: Tensor, *, subject: Subject | None = None) -> CopyEvent:
        """Start copying the bytes that were written back to the device, and return the end of the copies.

        Args:
            destination: Memory for the bytes, uint8. It is written once the computation submitted so far has ended.
            subject: See :meth:`write`.
        """

    @abstractmethod
    def release(self) -> None:
        """Give the room back, after waiting for the copies that are under way. The error of one is not raised again."""


class Store(ABC):
    """A place outside of the device.

    Attributes:
        host_bytes: Host memory that the place takes.
        written_bytes: Bytes copied to it so far.
        read_bytes: Bytes copied from it so far.
    """

    def __init__(self, host_bytes: int) -> None:
        self.host_bytes = host_bytes
        self.written_bytes = self.read_bytes = 0

    @property
    @abstractmethod
    def rooms(self) -> int:
        """Number of rooms that were taken and not released."""

    @property
    @abstractmethod
    def host_bytes_in_use(self) -> int:
        """Host memory that is in use."""

    @abstractmethod
    def take(self, size_bytes: int) -> Room | None:
        """Take room for bytes, or return `None` if there is not enough."""

    @abstractmethod
    def abandon(self) -> None:
        """Clean up after an interrupted step: wait for copies under way, successful or not."""

    @abstractmethod
    def close(self) -> None:
        """Wait for the copies under way, and free the memory."""


class FreeSpace:
    """Book-keeping of the ranges of `[0, size_bytes)` that are taken."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.bytes_in_use = 0
        self._taken: list[range] = []  # sorted by start

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, size_bytes: int) -> range | None:
        """Take a free range, or return `None` if there is none of this size."""
        stops = [0, *(taken.stop for taken in self._taken[-1:])]
        # The range that is taken first is given back last. A new range therefore fits at the end, and only seldom
        # between two others.
        if self.size_bytes - stops[-1] >= size_bytes:
            place, start = len(self._taken), stops[-1]
        else:
            stops = [0, *(taken.stop for taken in self._taken)]
            gaps = (n for n, taken in enumerate(self._taken) if taken.start - stops[n] >= size_bytes)
            place = next(gaps, -1)
            if place < 0:
                return None
            start = stops[place]
        self._taken.insert(place, range(start, start + size_bytes))
        self.bytes_in_use += size_bytes
        return self._taken[place]

    def give_back(self, taken: range) -> None:
        """Free a range that `take` returned."""
        self.bytes_in_use -= len(taken)
        if self._taken[-1] == taken:
            self._taken.pop()
        else:
            self._taken.remove(taken)
