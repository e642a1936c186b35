"""Simulates PyTorch's CUDA caching allocator over the memory requests of a step, without a GPU.

The simulation has the allocator's default settings: no limit on splitting, no rounding to powers of two, no garbage
collection. Device memory is unlimited, so no segment is returned to the device. Other memory on the device, for example
parameters, is not simulated, and neither are requests of other streams, which have their own pools.

Tests compare the simulation with torch 2.11 and 2.13 to 2.15, which it reproduces exactly, request by request (2.11 if
the addresses of segments ascend). Torch 2.12 chooses differently among free blocks of the same size and may therefore
need slightly more or less memory.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from lightning_memo.artifacts.trace import NEVER, Trace
from lightning_memo.utils.array_types import Integers

_MIB: Final = 2**20
_BLOCK: Final = 512
"""Requests are rounded up to multiples of this many bytes."""

_MOST_SMALL: Final = _MIB
"""Requests that are larger after rounding are served from the pool of large blocks."""

_SMALL_SEGMENT: Final = 2 * _MIB
_LARGE_SEGMENT: Final = 20 * _MIB
_OWN_SEGMENT: Final = 10 * _MIB
"""Requests of at least this size get a segment of their own."""

_OWN_SEGMENT_UNIT: Final = 2 * _MIB
_QUIET_STEPS: Final = 3
_MOST_STEPS: Final = 32


@dataclass(frozen=True, kw_only=True)
class MemoryCurve:
    """Memory over the requests of a step."""

    allocated_bytes: Integers
    """[requests] Bytes of the blocks in use after the request."""

    reserved_bytes: Integers
    """[requests] Bytes reserved from the device after the request."""

    steps: int
    """Number of times that the step was replayed. The curves are those of the last replay."""

    steady: bool
    """Whether reserved memory has stopped growing: for three replays, or for good because the blocks repeat."""

    @property
    def peak_allocated_bytes(self) -> int:
        """Highest number of bytes in use."""
        return int(self.allocated_bytes.max(initial=0))

    @property
    def peak_reserved_bytes(self) -> int:
        """Highest number of bytes reserved from the device."""
        return int(self.reserved_bytes.max(initial=0))


def replay(trace: Trace, *, expandable: bool = False) -> MemoryCurve:
    """Simulate a step repeatedly until it reserves no more memory.

    A buffer whose free was not recorded is freed right after the same request of the next step; otherwise, each step
    would need more memory than the one before.

    Args:
        trace: The recorded step. All requests of lane 0 are simulated, also those that get no offset in a plan.
        expandable: Whether to simulate `expandable_segments:True`.

    Returns:
        Memory over the requests of the last replay. Requests of other lanes do not change it.
    """
    allocator = _Allocator(expandable)
    step = _Step(trace)
    allocated, reserved = np.zeros(len(trace), np.int64), np.zeros(len(trace), np.int64)
    layouts, reserved_before = {step.layout(allocator)}, [0]
    steady = False
    while not steady and len(reserved_before) <= _MOST_STEPS:
        for row in step.requests(allocator):
            allocated[row], reserved[row] = allocator.allocated_bytes, allocator.reserved_bytes
        reserved_before.append(allocator.reserved_bytes)
        layout = step.layout(allocator)
        steady = layout in layouts or allocator.reserved_bytes in reserved_before[: -1 - _QUIET_STEPS]
        layouts.add(layout)
    steps = len(reserved_before) - 1
    return MemoryCurve(allocated_bytes=allocated, reserved_bytes=reserved, steps=steps, steady=steady)


class _Step:
    """The requests and frees of a step in order, and the live buffers."""

    def __init__(self, trace: Trace) -> None:
        self._size = trace.size.tolist()
        self._served = ((trace.lane == 0) & (trace.size > 0)).tolist()
        self._freed: list[list[int]] = [[] for _ in range(len(trace) + 1)]
        for row, death in enumerate(trace.death.tolist()):
            if death != NEVER:
                self._freed[death].append(row)
        self._live: dict[int, _Block] = {}

    def requests(self, allocator: _Allocator) -> Iterator[int]:
        """Run the step, and yield the index of each request right after it was served."""
        for row, served in enumerate(self._served):
            self._free(self._freed[row], allocator)
            before = self._live.get(row)
            if served:
                self._live[row] = allocator.malloc(self._size[row])
            yield row
            if before is not None:
                allocator.free(before)
        self._free(self._freed[-1], allocator)

    def _free(self, rows: list[int], allocator: _Allocator) -> None:
        for row in rows:
            if row in self._live:  # false in the first step for buffers of the previous one
                allocator.free(self._live.pop(row))

    def layout(self, allocator: _Allocator) -> tuple[object, ...]:
        """The complete state of the allocator, which determines the next step."""
        live = tuple(sorted((row, block.address) for row, block in self._live.items()))
        return live, allocator.free_blocks


class _Block:
    """A block of a segment, linked to its neighbors."""

    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, pool: _Pool, address: int, size: int) -> None:
        self.pool, self.address, self.size = pool, address, size
        self.free = False
        self.before: _Block | None = None
        self.after: _Block | None = None

    def link(self, after: _Block | None) -> None:
        """Set the neighbor at higher addresses."""
        self.after = after
        if after is not None:
            after.before = self


class _Pool:
    """The pool for small or for large requests.

    Args:
        segment_bytes: Size of the segments that several requests share.
        least_rest: Minimum size of a remainder for a block to be split.
    """

    def __init__(self, segment_bytes: int, least_rest: int) -> None:
        self.reserved_bytes = 0
        self._free: list[
            tuple[int, int, _Block]
        ] = []  # size, address, block: the first one large enough is the best fit
        self._segment_bytes, self._least_rest = segment_bytes, least_rest

    @property
    def free_blocks(self) -> tuple[tuple[int, int], ...]:
        """Addresses and sizes of the free blocks."""
        return tuple((address, size) for size, address, _ in self._free)

    def take(self, size: int) -> _Block:
        """Allocate a block of at least this size."""
        at = self._best_fit(size)
        block = self._free.pop(at)[2] if at < len(self._free) else self._reserve(size)
        block.free = False
        rest = block.size - size
        if rest >= self._least_rest:
            block.size = size
            self._insert(block.address + size, rest, block, block.after)
        return block

    def give_back(self, block: _Block) -> None:
        """Free a block, and merge it with its free neighbors."""
        block = self._joined(block)
        block.free = True
        insort(self._free, (block.size, block.address, block))

    def _best_fit(self, size: int) -> int:
        """Index of the smallest free block that is large enough; the number of free blocks if there is none."""
        return bisect_left(self._free, (size,))

    def _reserve(self, size: int) -> _Block:
        """Reserve a segment, as one block."""
        own_bytes = _rounded_up(size, _OWN_SEGMENT_UNIT)
        return self._map(own_bytes if size >= _OWN_SEGMENT else self._segment_bytes)

    def _map(self, size: int) -> _Block:
        block = _Block(self, self.reserved_bytes, size)
        self.reserved_bytes += size
        return block

    def _insert(self, address: int, size: int, before: _Block, after: _Block | None) -> None:
        block = _Block(self, address, size)
        block.free = True
        before.link(block)
        block.link(after)
        insort(self._free, (size, address, block))

    def _joined(self, block: _Block) -> _Block:
        """Merge a block with its free neighbors, which are removed from the free blocks."""
        before, after = block.before, block.after
        if after is not None and after.free:
            self._remove(after)
            block.size += after.size
            block.link(after.after)
        if before is not None and before.free:
            self._remove(before)
            before.size += block.size
            before.link(block.after)
            return before
        return block

    def _remove(self, block: _Block) -> None:
        del self._free[bisect_left(self._free, (block.size, block.address))]


class _ExpandablePool(_Pool):
    """An expandable segment, which grows at its end in whole pages.

    Args:
        page_bytes: Size of a page.
    """

    def __init__(self, page_bytes: int) -> None:
        super().__init__(page_bytes, least_rest=_BLOCK)
        self._end = _Block(self, 0, 0)

    def _best_fit(self, size: int) -> int:
        at = super()._best_fit(size)
        # The block at the end counts with the size to which it can grow, so any other block large enough fits better.
        return at + (at + 1 < len(self._free) and self._free[at][2].after is self._end)

    def _reserve(self, size: int) -> _Block:
        last = self._end.before
        room = last.size if last is not None and last.free else 0
        block = self._map(_rounded_up(size - room, self._segment_bytes))
        if last is not None:
            last.link(block)
        block.link(self._end)
        return self._joined(block)


class _Allocator:
    def __init__(self, expandable: bool) -> None:
        self.allocated_bytes = 0
        if expandable:
            self._small: _Pool = _ExpandablePool(_SMALL_SEGMENT)
            self._large: _Pool = _ExpandablePool(_LARGE_SEGMENT)
        else:
            self._small = _Pool(_SMALL_SEGMENT, least_rest=_BLOCK)
            self._large = _Pool(_LARGE_SEGMENT, least_rest=_MOST_SMALL + 1)

    @property
    def reserved_bytes(self) -> int:
        return self._small.reserved_bytes + self._large.reserved_bytes

    def malloc(self, size: int) -> _Block:
        size = _rounded_up(size, _BLOCK)
        block = (self._small if size <= _MOST_SMALL else self._large).take(size)
        self.allocated_bytes += block.size
        return block

    def free(self, block: _Block) -> None:
        self.allocated_bytes -= block.size
        block.pool.give_back(block)

    @property
    def free_blocks(self) -> tuple[object, ...]:
        return self._small.free_blocks, self._large.free_blocks


def _rounded_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
