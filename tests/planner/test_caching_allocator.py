"""The simulated caching allocator against cases computed by hand and against a naive simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memo.artifacts.trace import NEVER, Trace
from lightning_memo.planner.placement.caching_allocator import replay
from lightning_memo.planner.placement.step_placement import problem_of

KIB, MIB = 2**10, 2**20
END = 10**6
"""Death at the end of the step."""

SIZES = st.one_of(
    st.integers(0, 3 * KIB),
    st.integers(MIB - KIB, MIB + KIB),
    st.integers(0, 40 * MIB),
    st.sampled_from([5 * MIB, MIB]),
)


def trace_of(*rows, lane=0):
    """A trace of one phase from rows of (size, death)."""
    size, death = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return Trace(
        phases=("all",),
        phase=np.zeros(len(rows), np.int64),
        size=size,
        death=np.minimum(death, len(rows)),
        lane=np.full(len(rows), lane, np.int64),
    )


def peaks(*rows, expandable=False):
    """Peaks of allocated and reserved bytes, in MiB."""
    curve = replay(trace_of(*rows), expandable=expandable)
    assert curve.steady
    return curve.peak_allocated_bytes / MIB, curve.peak_reserved_bytes / MIB


@st.composite
def traces(draw, most=20):
    rows = draw(st.integers(1, most))
    return trace_of(*((draw(SIZES), draw(st.integers(NEVER, rows))) for _ in range(rows)))


class Naive:
    """Naive simulation: segments are lists of blocks (size, owner), which are searched linearly."""

    def __init__(self, expandable):
        self.expandable = expandable
        self.pools = {"small": [[]], "large": [[]]} if expandable else {"small": [], "large": []}
        self.reserved = 0

    @property
    def allocated(self):
        return sum(size for pool in self.pools.values() for one in pool for size, owner in one if owner is not None)

    def malloc(self, size, owner):
        size = -(-size // 512) * 512
        small = size <= MIB
        pool = self.pools["small" if small else "large"]
        found = [
            ((self.expandable and index == len(one) - 1, block_size, at, index), one)
            for at, one in enumerate(pool)
            for index, (block_size, user) in enumerate(one)
            if user is None and block_size >= size
        ]
        if not found:
            return self.reserve(pool, size, small) or self.malloc(size, owner)
        (_, block_size, _, index), segment = min(found, key=lambda entry: entry[0])
        least_rest = 512 if small or self.expandable else MIB + 1
        if block_size - size >= least_rest:
            segment[index : index + 1] = [(size, owner), (block_size - size, None)]
        else:
            segment[index] = block_size, owner
        return None

    def reserve(self, pool, size, small):
        unit = 2 * MIB if small else 20 * MIB
        if self.expandable:
            room = pool[0].pop()[0] if pool[0] and pool[0][-1][1] is None else 0
            grown = -(-(size - room) // unit) * unit
            pool[0].append((room + grown, None))
        else:
            grown = unit if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            pool.append([(grown, None)])
        self.reserved += grown

    def free(self, owner):
        for pool in self.pools.values():
            for segment in pool:
                joined = []
                for size, user in segment:
                    user = None if user == owner else user
                    if joined and user is None and joined[-1][1] is None:
                        joined[-1] = joined[-1][0] + size, None
                    else:
                        joined.append((size, user))
                segment[:] = joined


def naive_curves(trace, expandable, steps):
    """Bytes allocated and reserved over the last of some steps."""
    model = Naive(expandable)
    sizes, deaths = trace.size.tolist(), trace.death.tolist()
    for step in range(steps):
        curves = []
        for now in range(len(trace) + 1):
            for row, death in enumerate(deaths):
                if death == now:
                    model.free((step if death > row else step - 1, row))
                if death == NEVER and row == now - 1:
                    model.free((step - 1, row))
            if now < len(trace):
                if sizes[now]:
                    model.malloc(sizes[now], (step, now))
                curves.append((model.allocated, model.reserved))
    return np.array(curves).T


# ---- by hand


@pytest.mark.parametrize(("size", "allocated"), [(0, 0), (1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_sizes_are_rounded_up(size, allocated):
    assert replay(trace_of((size, END))).peak_allocated_bytes == allocated


@pytest.mark.parametrize(
    ("size", "reserved"),
    [
        (0, 0), (1, 2), (MIB, 2),
        (MIB + 1, 20), (10 * MIB - 512, 20),
        (10 * MIB, 10), (10 * MIB + 1, 12), (33 * MIB, 34),
    ],
)  # fmt: skip
def test_segments(size, reserved):
    assert replay(trace_of((size, END))).peak_reserved_bytes == reserved * MIB


def test_a_large_block_is_split_when_more_than_one_mib_is_left():
    # 11 MiB are left of a segment of 20.
    assert peaks((9 * MIB, END), (10 * MIB, END)) == (20, 20)
    assert peaks((9 * MIB, END), (10 * MIB - 512, END)) == (19 - 512 / MIB, 20)


def test_a_small_block_is_split_when_512_bytes_are_left():
    assert peaks((MIB, END), (MIB - 512, END), (1, END)) == (2, 2)
    assert peaks((MIB, END), (MIB, END), (1, END)) == (2 + 512 / MIB, 4)


def test_free_neighbours_are_joined():
    four = [(5 * MIB, END)] * 4
    assert peaks(four[0], (5 * MIB, 4), (5 * MIB, 4), four[3], (10 * MIB, END)) == (20, 20)
    assert peaks((5 * MIB, 4), four[1], (5 * MIB, 4), four[3], (10 * MIB, END)) == (20, 30)
    # The one in the middle last, joined with both.
    between = [(1, END)] * 2
    assert peaks((5 * MIB, 4), (5 * MIB, 5), (5 * MIB, 4), four[3], *between, (15 * MIB, END))[1] == 20 + 2


def test_the_smallest_block_that_is_large_enough_is_taken():
    # In the 12 MiB, not in the 20: what is left is too little to split.
    assert peaks((9 * MIB, 2), (12 * MIB, 2), (11 * MIB, END)) == (21, 32)
    assert replay(trace_of((9 * MIB, 2), (12 * MIB, 2), (11 * MIB, END))).allocated_bytes[2] == 12 * MIB


def test_the_cache_is_warm():
    curve = replay(trace_of((MIB, END), (30 * MIB, END)))
    assert (curve.steps, curve.steady) == (2, True)
    assert curve.reserved_bytes.tolist() == [32 * MIB, 32 * MIB]
    assert curve.allocated_bytes.tolist() == [MIB, 31 * MIB]


def test_lives_over_the_end_of_a_step():
    # The second is freed before the same request of the next step, the third before the first one.
    curve = replay(trace_of((MIB, 1), (10 * MIB, 1), (12 * MIB, 0)))
    assert (curve.allocated_bytes / MIB).tolist() == [11, 10, 22]


def test_a_buffer_that_is_not_freed_meets_the_next_one():
    curve = replay(trace_of((10 * MIB, NEVER), (12 * MIB, 2)))
    assert (curve.allocated_bytes / MIB).tolist() == [20, 22]
    # The new one takes the segment that the other buffer has left, and that one needs another.
    assert curve.peak_reserved_bytes == (10 + 12 + 12) * MIB
    assert curve.steady


def test_other_lanes_are_left_out():
    curve = replay(trace_of((MIB, END), (MIB, NEVER), lane=1))
    assert curve.allocated_bytes.tolist() == curve.reserved_bytes.tolist() == [0, 0]


def test_nothing_is_requested():
    nothing = np.zeros(0, np.int64)
    curve = replay(Trace(phases=(), phase=nothing, size=nothing, death=nothing, lane=nothing))
    assert (curve.peak_allocated_bytes, curve.peak_reserved_bytes, curve.steady) == (0, 0, True)


def test_an_expandable_segment_grows_by_what_is_missing():
    rows = (15 * MIB, 1), (25 * MIB, END)
    assert peaks(*rows) == (26, 42)  # a rest of 1 MiB is not split off
    assert peaks(*rows, expandable=True) == (25, 40)


def test_expandable_segments_are_split_to_the_last_512_bytes():
    assert peaks((20 * MIB - 512, END)) == (20, 20)
    assert peaks((20 * MIB - 512, END), expandable=True) == (20 - 512 / MIB, 20)


@pytest.mark.parametrize(("size", "reserved"), [(1, 2), (MIB, 2), (MIB + 1, 20), (20 * MIB, 20), (20 * MIB + 1, 40)])
def test_pages_of_expandable_segments(size, reserved):
    assert peaks((size, END), expandable=True)[1] == reserved


def test_the_end_of_an_expandable_segment_is_taken_last():
    # The 3 MiB go where the first was, not to the 4 at the end, which then need 20 more rather than 40.
    rows = (8 * MIB, 2), (8 * MIB, END), (3 * MIB, END), (24 * MIB, END)
    assert peaks(*rows, expandable=True) == (35, 40)


# ---- of all traces


@given(traces(), st.booleans())
@settings(max_examples=150)
def test_same_as_a_naive_model(trace, expandable):
    curve = replay(trace, expandable=expandable)
    allocated, reserved = naive_curves(trace, expandable, curve.steps)
    assert curve.allocated_bytes.tolist() == allocated.tolist()
    assert curve.reserved_bytes.tolist() == reserved.tolist()


@given(traces(most=40), st.booleans())
@settings(max_examples=150)
def test_reserved_covers_allocated_covers_live(trace, expandable):
    curve = replay(trace, expandable=expandable)
    planned = problem_of(trace, 512)
    times, load = planned.load
    live = np.append(0, load)[np.searchsorted(times, np.arange(len(trace)), side="right")]
    assert (curve.reserved_bytes >= curve.allocated_bytes).all()
    assert (curve.allocated_bytes >= live).all()
    assert not (curve.reserved_bytes % (2 * MIB)).any()
    assert curve.steady
    assert len(set(curve.reserved_bytes.tolist())) == 1
