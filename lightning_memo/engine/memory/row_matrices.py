"""Matrices with one row per token, of which a few rows at a time are brought to the device."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from lightning_memo.engine.copy_streams import CopyEvent
from lightning_memo.engine.memory.slot_memory import SlotMemory

# Waits for rows that are being fetched, and returns them: `[rows, features]`.
Arrival = Callable[[], Tensor]
RowFunction = Callable[[Tensor], Tensor]


class Rows(ABC):
    """A matrix `[rows, features]` of which some rows at a time are brought to the device."""

    @abstractmethod
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        """Start bringing ranges of rows to the device, and return what waits for them; the ranges are concatenated."""


class DeviceRows(Rows):
    """Rows that are on the device."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @override
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        parts = [self._matrix[rows.start : rows.stop] for rows in ranges]
        return lambda: torch.cat(parts) if len(parts) > 1 else parts[0]


class ComputedRows(Rows):
    """Rows that are computed every time they are fetched."""

    def __init__(self, compute: Callable[[Sequence[range]], Tensor]) -> None:
        self._compute = compute

    @override
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        return lambda: self._now(ranges)

    @torch.no_grad()
    def _now(self, ranges: Sequence[range]) -> Tensor:
        return self._compute(ranges)


class MappedRows(Rows):
    """A function of each row of another matrix."""

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
    """Rows in a host buffer. They are written before they are fetched.

    Args:
        memory: Provides the host buffer and the copies.
        rows: Number of rows.
        features: Number of entries of each row.
        dtype: Data type of the entries.
    """

    def __init__(self, memory: SlotMemory, rows: int, features: int, dtype: torch.dtype) -> None:
        self._memory, self._features, self._dtype = memory, features, dtype
        self._row_bytes = features * dtype.itemsize
        self._buffer = memory.take_host_buffer(rows * self._row_bytes, memory.state_arena)
        self._leaving: deque[tuple[Tensor, CopyEvent]] = deque()

    def write(self, first: int, rows: Tensor) -> None:
        """Start copying `rows` `[..., features]` to the host; they become the rows from number `first` on."""
        self._free_sources(1)
        source = rows.detach().contiguous().view(-1).view(torch.uint8)
        self._leaving.append((source, self._memory.copy_to_host(self._buffer, first * self._row_bytes, source)))

    def _free_sources(self, kept: int) -> None:
        """Free the device memory of copied rows, except for that of the last `kept` copies."""
        while len(self._leaving) > kept:
            source, copied = self._leaving.popleft()
            copied.wait()
            del source  # only now, because its memory is used again by what is computed next

    @override
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        if not self._buffer.alive:
            raise RuntimeError(
                "hidden states were read after their step, when the host memory that held them had been freed: copy "
                'what you need and run each backward within the step, or set host_backed="attention"'
            )
        self._free_sources(0)
        count = sum(map(len, ranges))
        data = torch.empty(count * self._row_bytes, dtype=torch.uint8, device=self._memory.device)
        pieces = data.split([len(rows) * self._row_bytes for rows in ranges])
        events = [
            self._memory.copy_from_host(piece, self._buffer, rows.start * self._row_bytes)
            for piece, rows in zip(pieces, ranges, strict=True)
        ]

        def arrive() -> Tensor:
            while events:
                events.pop().wait()
            return data.view(self._dtype).view(count, self._features)

        return arrive


def part_rows(shape: Sequence[int], dim: int, start: int, stop: int) -> list[range]:
    """Return the rows of the entries `[start, stop)` of a dimension.

    Args:
        shape: Shape of the tensor. Rows are counted over all dimensions but the last.
        dim: The dimension; not the last one.
        start: First entry.
        stop: End of the entries.
    """
    inner, size = math.prod(shape[dim + 1 : -1]), shape[dim]
    return [range((n * size + start) * inner, (n * size + stop) * inner) for n in range(math.prod(shape[:dim]))]
