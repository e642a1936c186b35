"""Matrices of one row per token of which some rows at a time come to the device, from wherever they are."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_memo.engine.copies.copy_events import CopyEvent
from lightning_memo.engine.memory.restored_checks import RowChecks
from lightning_memo.engine.memory.slot_memory import SlotMemory

# Waits for rows that are on their way, and gives them: `[rows, features]`.
Arrival = Callable[[], Tensor]
RowFunction = Callable[[Tensor], Tensor]


class Rows(ABC):
    """A matrix `[rows, features]` of which some rows at a time come to the device."""

    @abstractmethod
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        """Start bringing some ranges of rows to the device, one behind the other."""


class DeviceRows(Rows):
    """They are on the device."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @override
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        parts = [self._matrix[rows.start : rows.stop] for rows in ranges]
        return lambda: torch.cat(parts) if len(parts) > 1 else parts[0]


class ComputedRows(Rows):
    """They are computed whenever they are asked for."""

    def __init__(self, compute: Callable[[Sequence[range]], Tensor]) -> None:
        self._compute = compute

    @override
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        return lambda: self._now(ranges)

    @torch.no_grad()
    def _now(self, ranges: Sequence[range]) -> Tensor:
        return self._compute(ranges)


class MappedRows(Rows):
    """A function of single rows, of rows that are elsewhere."""

    def __init__(self, rows: Rows, function: RowFunction) -> None:
        self._rows, self._function = rows, function

    @override
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        arrival = self._rows.fetch(ranges)

        def arrive() -> Tensor:
            with torch.no_grad():
                return self._function(arrival())

        return arrive


class HostRows(Rows):
    """They are on the host, where they were written before they are read.

    Args:
        memory: Gives room, and copies.
        rows: How many.
        features: Entries of each.
        dtype: Of an entry.
        name: What they are.
    """

    def __init__(
        self, memory: SlotMemory, rows: int, features: int, dtype: torch.dtype, name: str = "hidden states"
    ) -> None:
        self._memory, self._features, self._dtype = memory, features, dtype
        self._row_bytes = features * dtype.itemsize
        self._room = memory.take_room(rows * self._row_bytes, memory.state_arena)
        self._leaving: deque[tuple[Tensor, CopyEvent]] = deque()
        self._checks = RowChecks(name, rows, features, dtype, memory.device) if memory.check_restored else None

    def write(self, first: int, rows: Tensor) -> None:
        """Start copying `rows` `[..., features]` to the host, as the rows from `first` on."""
        while len(self._leaving) > 1:  # its device memory may go once the copy has ended
            self._leaving.popleft()[1].wait()
        source = rows.detach().contiguous().view(-1).view(torch.uint8)
        if self._checks is not None:
            self._checks.note(first, source)
        self._leaving.append((source, self._memory.write_host(self._room, first * self._row_bytes, source)))

    @override
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        if not self._room.alive:
            raise RuntimeError(
                "hidden states of a step that is over were asked for, and the host keeps them no longer: take what you "
                'need of them within the step, or set host_backed="attention"'
            )
        while self._leaving:
            self._leaving.popleft()[1].wait()
        count = sum(map(len, ranges))
        place = torch.empty(count * self._row_bytes, dtype=torch.uint8, device=self._memory.device)
        pieces = place.split([len(rows) * self._row_bytes for rows in ranges])
        events = [
            self._memory.read_host(piece, self._room, rows.start * self._row_bytes)
            for piece, rows in zip(pieces, ranges, strict=True)
        ]

        def arrive() -> Tensor:
            arrived = not events
            while events:
                events.pop().wait()
            if self._checks is not None and not arrived:
                self._checks.compare(ranges, place)
            return place.view(self._dtype).view(count, self._features)

        return arrive


def part_rows(shape: Sequence[int], dim: int, start: int, stop: int) -> list[range]:
    """The rows that the entries `[start, stop)` of a dimension are, counted over all dimensions but the last."""
    inner, size = math.prod(shape[dim + 1 : -1]), shape[dim]
    return [range((n * size + start) * inner, (n * size + stop) * inner) for n in range(math.prod(shape[:dim]))]
