"""Placements against brute force, and each part of the solver against a naive computation."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import replace
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_memo.planner.placement import Finding, Placement, PlacementFault, Problem, mip, place, solve, validate
from lightning_memo.planner.placement import placement_core as core
from lightning_memo.planner.placement.placement_core import (
    NativeCore,
    PythonCore,
    SearchOutcome,
    available_library,
    load_library,
    opened,
)
from lightning_memo.planner.placement.problem import MAX_BYTES, independent_groups, section
from lightning_memo.utils import native_build as native

HORIZON = 8
SIZES, SOLID = st.integers(0, 9), st.integers(1, 9)
CIRCLE = [(0, 3, 1), (2, 5, 1), (4, 7, 1), (6, 9, 1), (8, 1, 1)]
"""Around a period of 10: the load is at most 2, but five arcs, each of which meets the next, need three rows."""

MANY_NODES, MANY_SECONDS = 10**6, 60.0


def problem_of(rows, **settings):
    """A problem from rows of (lower, upper, size)."""
    lower, upper, size = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    return Problem(lower=lower, upper=upper, size=size, **settings)


def placement_of(problem, offset, **changes):
    offset = np.array(offset, np.int64)
    peak = int((offset + problem.size).max(initial=0))
    values = {"offset": offset, "peak_bytes": peak, "lower_bound_bytes": 0, "method": "by hand", "seconds": 0.0}
    return Placement(**values | changes)


@st.composite
def problems(draw, most=6, least=0, sizes=SIZES, alignments=(1,), periods=(None, HORIZON)):
    period = draw(st.sampled_from(periods))
    rows = []
    for _ in range(draw(st.integers(least, most))):
        if period is None:
            lower = draw(st.integers(0, HORIZON - 1))
            upper = draw(st.integers(lower + 1, HORIZON))
        else:
            lower, upper = draw(st.integers(0, period - 1)), draw(st.integers(0, period))
        rows.append((lower, upper, draw(sizes)))
    for _ in range(draw(st.integers(0, 2)) if 0 < len(rows) < most - 1 else 0):  # identical buffers
        rows.append(draw(st.sampled_from(rows)))
    return problem_of(rows, period=period, alignment=draw(st.sampled_from(alignments)))


# ---- naive computations


def ticks(problem):
    """Units of time in which each buffer lives."""
    found = []
    for lower, upper in zip(problem.lower.tolist(), problem.upper.tolist(), strict=True):
        if lower < upper:
            found.append(frozenset(range(lower, upper)))
        else:
            found.append(frozenset(range(lower, problem.period)) | frozenset(range(upper)))
    return found


def meetings(problem):
    """Pairs of buffers, ascending, that are alive together."""
    life = ticks(problem)
    return {(i, j) for i, j in combinations(range(len(problem)), 2) if life[i] & life[j]}


def naive_load(problem):
    """Live padded bytes in each unit of time."""
    life, size = ticks(problem), problem.padded_size.tolist()
    return [sum(s for s, lives in zip(size, life, strict=True) if t in lives) for t in range(HORIZON)]


def overlaps(problem, offset):
    """Pairs of buffers that are alive together and share bytes."""
    end = [o + s for o, s in zip(offset, problem.size.tolist(), strict=True)]
    return {(i, j) for i, j in meetings(problem) if max(offset[i], offset[j]) < min(end[i], end[j])}


def optimum(problem):
    """Lowest possible peak, by brute force.

    Take any placement, and drop its buffers in the order of their offsets, each to the floor or to the highest top
    among those before it that it meets: none rises. So some order of drops reaches the optimum, and all are tried.
    """
    size, align = problem.size.tolist(), problem.alignment
    solid = [buffer for buffer in range(len(problem)) if size[buffer]]
    meets = meetings(problem)
    under = {i: [j for j in solid if (min(i, j), max(i, j)) in meets] for i in solid}
    best = sum(problem.padded_size.tolist())
    for order in permutations(solid):
        top = {}
        for buffer in order:
            floor = max((top[other] for other in under[buffer] if other in top), default=0)
            top[buffer] = -(-floor // align) * align + size[buffer]
            if top[buffer] > best:
                break
        else:
            best = min(best, max(top.values(), default=0))
    return best


def padded(problem):
    """The problem with sizes up to the next multiple of the alignment."""
    return replace(problem, size=problem.padded_size)


# ---- the C++ core


@contextmanager
def searching(problem):
    with opened(problem, load_library()) as compiled:
        if not isinstance(compiled, NativeCore):
            pytest.skip("no C++ compiler")
        yield compiled


def fail_to_build():
    raise native.BuildError("no C++ compiler")


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(core, "load_library", fail_to_build)


def search(problem, capacity, rank=None, nodes=MANY_NODES):
    """Outcome, offsets and weights of one search in a problem that is divided into sections."""
    rank = np.arange(len(problem.size), dtype=np.int32) if rank is None else rank
    weight = np.zeros(len(problem.size), np.int64)
    with searching(problem) as compiled:
        return *compiled.search(capacity, rank, nodes, MANY_SECONDS, weight), weight


def shuffled(problem, seed):
    return np.random.default_rng(seed).permutation(len(problem.size)).astype(np.int32)


def hard_problem(buffers=200, seed=0):
    """A problem with so many buffers that no search ends soon."""
    draw = random.Random(seed)
    rows = []
    for _ in range(buffers):
        lower = draw.randrange(100)
        rows.append((lower, lower + draw.randint(1, 30), draw.randint(1, 10**6)))
    return problem_of(rows)


# ---- place


@settings(max_examples=250)
@given(problems())
def test_place_finds_the_optimum_of_small_problems_and_proves_it(problem):
    placement = place(problem)
    assert validate(problem, placement) == []
    assert not overlaps(problem, placement.offset.tolist())
    assert placement.peak_bytes == placement.lower_bound_bytes == optimum(problem)
    assert placement.optimal
    assert placement.gap == 0


@settings(max_examples=100)
@given(problems(alignments=(2, 3, 8)))
def test_aligned_offsets_are_those_of_the_optimum_of_padded_sizes(problem):
    placement = place(problem)
    assert validate(problem, placement) == []
    assert not (placement.offset % problem.alignment).any()
    assert int((placement.offset + problem.padded_size).max(initial=0)) == optimum(padded(problem))


@settings(max_examples=100)
@given(problems(alignments=(2, 3, 8)))
def test_an_alignment_makes_no_bound_wrong(problem):
    placement = place(problem)
    lowest = optimum(replace(problem, size=problem.padded_size))
    assert placement.lower_bound_bytes <= lowest <= placement.peak_bytes
    assert not placement.optimal or placement.peak_bytes == lowest


@settings(max_examples=50)
@given(problems(sizes=st.sampled_from([4, 4, 8])))
def test_place_finds_the_optimum_among_ties(problem):
    placement = place(problem)
    assert placement.peak_bytes == placement.lower_bound_bytes == optimum(problem)


def test_nothing_is_placed_at_a_peak_of_zero():
    placement = place(problem_of([]))
    assert len(placement.offset) == placement.peak_bytes == placement.lower_bound_bytes == 0
    assert placement.optimal
    assert placement.gap == 0


def test_buffers_without_bytes_need_no_room():
    problem = problem_of([(0, 2, 0), (1, 3, 0)])
    placement = place(problem)
    assert placement.peak_bytes == 0
    assert validate(problem, placement) == []


@pytest.mark.parametrize("alignment", [1, 512])
def test_a_single_buffer_lies_on_the_floor(alignment):
    placement = place(problem_of([(3, 7, 1024)], alignment=alignment))
    assert placement.offset.tolist() == [0]
    assert placement.peak_bytes == placement.lower_bound_bytes == 1024


def test_a_buffer_that_lives_all_the_period_meets_every_other():
    problem = problem_of([(3, 3, 5), (0, 2, 1), (2, 8, 2), (0, 8, 4)], period=HORIZON)
    assert place(problem).peak_bytes == 5 + 2 + 4


def test_the_bound_rises_above_the_largest_load_where_no_placement_meets_it():
    problem = problem_of(CIRCLE, period=10)
    assert problem.lower_bound_bytes == 2
    placement = place(problem)
    assert placement.peak_bytes == placement.lower_bound_bytes == optimum(problem) == 3


def test_a_capacity_that_is_met_ends_the_work(monkeypatch):
    monkeypatch.setattr(solve, "_SECONDS_AFTER_FIT", 0.0)
    problem, seen = hard_problem(), []
    enough = int(problem.size.sum())
    placement = place(problem, capacity_bytes=enough, progress=seen.append)
    assert len(seen) <= 2
    assert validate(problem, placement, enough) == []


def test_a_capacity_that_is_not_met_yields_the_best_that_was_found():
    problem = problem_of(CIRCLE, period=10)
    placement = place(problem, capacity_bytes=2)
    assert placement.peak_bytes == placement.lower_bound_bytes == 3
    assert Finding(PlacementFault.CAPACITY, (int(placement.offset.argmax()),)) in validate(problem, placement, 2)


def test_a_short_time_limit_still_gives_a_right_placement():
    problem = hard_problem()
    placement = place(problem, time_limit_seconds=0.01)
    assert validate(problem, placement) == []
    assert placement.lower_bound_bytes >= problem.lower_bound_bytes


def test_progress_never_goes_back():
    problem, seen = hard_problem(80), []
    placement = place(problem, time_limit_seconds=1.0, progress=seen.append)
    assert {report.stage for report in seen} >= {"one-pass placements"}
    for earlier, later in pairwise(seen):
        assert earlier.peak_bytes >= later.peak_bytes
        assert earlier.lower_bound_bytes <= later.lower_bound_bytes
        assert earlier.seconds <= later.seconds
    assert all(report.lower_bound_bytes <= report.peak_bytes for report in seen)
    assert placement.peak_bytes == seen[-1].peak_bytes
    assert placement.lower_bound_bytes == seen[-1].lower_bound_bytes


def test_progress_never_goes_back_on_small_problems():
    problem, seen = problem_of(CIRCLE, period=10), []
    place(problem, progress=seen.append)
    assert [report.lower_bound_bytes for report in seen] == sorted(report.lower_bound_bytes for report in seen)
    assert seen[-1].lower_bound_bytes == 3


def test_buffers_that_never_meet_all_lie_on_the_floor():
    birth = np.arange(100, dtype=np.int64)
    placement = place(Problem(lower=2 * birth, upper=2 * birth + 1, size=birth + 1))
    assert placement.peak_bytes == placement.lower_bound_bytes == 100
    assert not placement.offset.any()


# ---- without a compiler


@settings(max_examples=40)
@given(problems(sizes=SOLID))
def test_without_a_compiler_small_problems_still_reach_the_optimum(problem):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "load_library", fail_to_build)
        placement = place(problem)
    assert placement.method != "search"
    assert validate(problem, placement) == []
    assert placement.peak_bytes == placement.lower_bound_bytes == optimum(problem)


def test_without_a_compiler_highs_raises_the_bound(no_compiler):
    problem = problem_of(CIRCLE, period=10)
    placement = place(problem)
    assert placement.peak_bytes == placement.lower_bound_bytes == 3


def test_without_a_compiler_the_core_is_the_python_one(no_compiler):
    with opened(section(problem_of([(0, 1, 1)])), available_library()) as opened_core:
        assert isinstance(opened_core, PythonCore)


@settings(max_examples=100)
@given(problems(most=25, least=1, sizes=SOLID), st.integers(0, 2**32 - 1))
def test_both_cores_place_alike(problem, seed):
    sectioned = section(problem)
    order, python = shuffled(sectioned, seed), PythonCore(sectioned)
    with searching(sectioned) as compiled:
        for tightest in (False, True):
            assert compiled.fit(order, tightest).tolist() == python.fit(order, tightest).tolist()
        assert compiled.skyline(order).tolist() == python.skyline(order).tolist()


@settings(max_examples=50)
@given(problems(most=25, least=1, sizes=SOLID))
def test_every_one_pass_placement_is_right(problem):
    sectioned = section(problem)
    for name, offset in mip.placements(sectioned, PythonCore(sectioned)):
        assert not overlaps(problem, (offset * sectioned.unit_bytes).tolist()), name
        assert (offset >= 0).all()


@settings(max_examples=50)
@given(problems(most=12, least=1, sizes=SOLID), st.sampled_from(mip.ORDERS))
def test_ranks_count_every_buffer_once(problem, order):
    rank = mip.ranks(section(problem), order)
    assert sorted(rank.tolist()) == list(range(len(problem)))
    assert mip.rank_of(mip.rank_of(rank)).tolist() == rank.tolist()


def test_the_letters_of_an_order_decide_in_turn():
    sectioned = section(problem_of([(0, 2, 4), (0, 1, 4), (4, 5, 8), (0, 3, 1)]))
    assert mip.ranks(sectioned, "Z").tolist() == [1, 2, 0, 3]
    assert mip.ranks(sectioned, "W").tolist() == [1, 3, 2, 0]
    assert mip.ranks(sectioned, "A").tolist() == [1, 2, 0, 3]
    assert mip.ranks(sectioned, "TZ").tolist() == [0, 1, 3, 2]
    assert mip.ranks(sectioned, "TWA").tolist() == [1, 2, 3, 0]


# ---- the search


@settings(max_examples=100)
@given(problems(least=1, sizes=SOLID), st.integers(0, 2**32 - 1))
def test_the_search_decides_every_capacity(problem, seed):
    sectioned = section(problem)
    unit, lowest = sectioned.unit_bytes, optimum(problem)
    rank = shuffled(sectioned, seed)
    for capacity in range(int(sectioned.size.max()), int(sectioned.size.sum()) + 1):
        outcome, offset, _ = search(sectioned, capacity, rank)
        assert outcome is (SearchOutcome.FOUND if capacity * unit >= lowest else SearchOutcome.INFEASIBLE)
        if outcome is SearchOutcome.FOUND:
            assert validate(problem, placement_of(problem, offset * unit), capacity * unit) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_the_search_agrees_with_highs_where_time_goes_round(count):
    @settings(max_examples=count)
    @given(problems(most=10, least=7, sizes=SOLID, periods=(HORIZON,)), st.integers(0, 2**32 - 1))
    def each(problem, seed):
        # HiGHS proves most of these in less than a second, but not all in any time: what it claims always holds.
        sectioned = section(problem)
        offset, bound = improve(sectioned, seconds=1.0)
        reached = int(sectioned.size.sum() if offset is None else (offset + sectioned.size).max())
        rank = shuffled(sectioned, seed)
        least = max(bound - 1, int(sectioned.size.max()))
        outcomes = {capacity: search(sectioned, capacity, rank)[0] for capacity in range(least, reached + 1)}
        assert outcomes[reached] is SearchOutcome.FOUND
        if least < bound:
            assert outcomes[least] is SearchOutcome.INFEASIBLE
        found = [capacity for capacity, outcome in outcomes.items() if outcome is SearchOutcome.FOUND]
        assert found == list(range(min(found), reached + 1))  # what fits a capacity fits a larger one

    each()


def test_the_search_alone_raises_the_bound(monkeypatch):
    monkeypatch.setattr(mip, "MOST_PAIRS", -1)
    problem = problem_of(CIRCLE, period=10)
    with searching(section(problem)):  # skips without a compiler
        placement = place(problem, time_limit_seconds=5.0)
    assert placement.peak_bytes == placement.lower_bound_bytes == 3


@settings(max_examples=100)
@given(problems(most=12, least=1, sizes=SOLID), st.integers(0, 40), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_wide_heights_search_as_narrow_ones_do(problem, above, nodes, seed):
    narrow, scale = section(problem), 2**40
    wide = replace(narrow, size=narrow.size * scale)
    rank = shuffled(narrow, seed)
    capacity = int(narrow.load.max()) + above
    outcome, offset, weight = search(narrow, capacity, rank, nodes)
    wide_outcome, wide_offset, wide_weight = search(wide, capacity * scale + scale - 1, rank, nodes)
    assert wide_outcome is outcome
    assert (wide_offset == offset * scale).all()
    assert (wide_weight == weight).all()


@settings(max_examples=50)
@given(problems(most=5, least=1))
def test_large_sizes_reach_the_optimum_too(problem):
    scale, period = 2**40, problem.period
    rows = [(0, HORIZON, 1)]  # one byte below everything: sizes have no large divisor
    rows += zip(problem.lower.tolist(), problem.upper.tolist(), (problem.size * scale).tolist(), strict=True)
    large = problem_of(rows, period=period)
    placement = place(large)
    assert validate(large, placement) == []
    assert placement.peak_bytes == placement.lower_bound_bytes == optimum(problem) * scale + 1


def test_a_search_out_of_nodes_proves_nothing():
    sectioned = section(hard_problem())
    outcome, offset, _ = search(sectioned, int(sectioned.load.max()), nodes=50)
    assert outcome is SearchOutcome.INTERRUPTED
    assert not offset.any()


def test_a_search_out_of_time_proves_nothing():
    sectioned = section(hard_problem())
    rank, weight = np.arange(len(sectioned.size), dtype=np.int32), np.zeros(len(sectioned.size), np.int64)
    with searching(sectioned) as compiled:
        outcome, _ = compiled.search(int(sectioned.load.max()), rank, 10**12, 0.05, weight)
    assert outcome is SearchOutcome.INTERRUPTED


def test_what_was_in_the_way_gains_weight():
    sectioned = section(problem_of(CIRCLE, period=10))
    outcome, _, weight = search(sectioned, 2)
    assert outcome is SearchOutcome.INFEASIBLE
    assert weight.sum() > 0


# ---- HiGHS


def improve(problem, offset=None, seconds=20.0):
    """Result of HiGHS for buffers stacked one after the other: offsets or None, and the bound."""
    stacked = np.concatenate([[0], np.cumsum(problem.size)[:-1]])
    return mip.improve(problem, stacked if offset is None else offset, int(problem.load.max()), seconds)


@settings(max_examples=60)
@given(problems(least=1, sizes=SOLID))
def test_highs_reaches_the_optimum_of_small_problems_and_proves_it(problem):
    sectioned = section(problem)
    unit, lowest = sectioned.unit_bytes, optimum(problem)
    offset, bound = improve(sectioned)
    assert bound * unit == lowest
    if offset is None:
        assert lowest == problem.size.sum()
    else:
        assert validate(problem, placement_of(problem, offset * unit), lowest) == []


@settings(max_examples=30)
@given(problems(least=1, sizes=SOLID))
def test_highs_leaves_the_optimum_alone(problem):
    sectioned = section(problem)
    best = place(problem).offset // sectioned.unit_bytes
    offset, bound = improve(sectioned, best)
    assert offset is None
    assert bound * sectioned.unit_bytes == optimum(problem)


LARGE = {
    "billions of units": ([(4, 7, 121415074), (5, 8, 395092727), (4, 7, 353318410), (2, 3, 627950877), (5, 6, 39705643),
                           (0, 5, 592704779)], None),
    "billions of units around a period": ([(5, 3, 829709975), (1, 2, 287238538), (1, 3, 140202466), (2, 0, 807234413),
                                           (5, 8, 101141989), (2, 7, 41401890)], HORIZON),
    "trillions of units": ([(7, 3, 668518891455), (3, 8, 525672764116), (1, 6, 737435874599), (3, 5, 538063489002),
                            (0, 2, 95297199566)], HORIZON),
    "more than a float holds": ([(2, 4, 2**57 + 1), (3, 5, 2**56 + 3)], None),
}  # fmt: skip


def assert_no_false_claim(problem):
    sectioned = section(problem)
    offset, bound = improve(sectioned)
    assert bound * sectioned.unit_bytes <= optimum(problem)
    if offset is not None:
        assert validate(problem, placement_of(problem, offset * sectioned.unit_bytes)) == []
        assert (offset + sectioned.size).max() < sectioned.size.sum()


@pytest.mark.parametrize(("rows", "period"), LARGE.values(), ids=LARGE)
def test_highs_makes_no_false_claim_about_large_sizes(rows, period):
    assert_no_false_claim(problem_of(rows, period=period))


@pytest.mark.slow
@settings(max_examples=60)
@given(
    problems(least=2, sizes=st.sampled_from([2**10, 2**20, 2**30, 2**40, 2**50]).flatmap(lambda n: st.integers(1, n)))
)
def test_highs_makes_no_false_claim_about_sizes_of_any_magnitude(problem):
    assert_no_false_claim(problem)


def test_without_a_compiler_sizes_that_are_too_large_for_highs_are_placed(no_compiler):
    rows = [
        (4, 1, 381152411614223),
        (1, 7, 396496385674173),
        (0, 4, 819538508975238),
        (2, 2, 417458705516942),
        (7, 1, 159186777134186),
        (5, 6, 338407151598842),
    ]
    problem = problem_of(rows, period=HORIZON)
    placement = place(problem, time_limit_seconds=5.0)
    assert validate(problem, placement) == []
    assert placement.lower_bound_bytes <= optimum(problem) <= placement.peak_bytes


def test_highs_out_of_time_is_never_worse():
    sectioned = section(hard_problem(40))
    stacked = np.concatenate([[0], np.cumsum(sectioned.size)[:-1]])
    offset, bound = improve(sectioned, stacked, seconds=0.1)
    peak = int(((stacked if offset is None else offset) + sectioned.size).max())
    assert sectioned.load.max() <= bound <= peak <= sectioned.size.sum()


# ---- sections and groups


@settings(max_examples=200)
@given(problems(most=12, least=1, sizes=SOLID, alignments=(1, 4)))
def test_every_maximal_set_of_live_buffers_is_a_section(problem):
    life, sectioned = ticks(problem), section(problem)
    at_once = {frozenset(i for i, lives in enumerate(life) if t in lives) for t in range(HORIZON)}
    cut = [frozenset(sectioned.live(s).tolist()) for s in range(sectioned.sections)]
    maximal = {live for live in at_once if live and not any(live < other for other in at_once)}
    assert maximal <= set(cut) <= at_once
    assert not any(first <= second for first, second in pairwise(cut) if not problem.wraps.any())


@settings(max_examples=200)
@given(problems(most=12, least=1, sizes=SOLID, alignments=(1, 4)))
def test_sections_keep_loads_and_meetings(problem):
    sectioned = section(problem)
    assert (sectioned.size * sectioned.unit_bytes == problem.padded_size).all()
    assert np.gcd.reduce(sectioned.size) == 1
    assert set(mip.pairs(sectioned)) == meetings(problem)
    naive = naive_load(problem)
    assert sectioned.load.max() * sectioned.unit_bytes == problem.lower_bound_bytes == max(naive)
    for lives, contention in zip(ticks(problem), sectioned.contention.tolist(), strict=True):
        assert contention * sectioned.unit_bytes == max(naive[t] for t in lives)
    assert sectioned.duration.tolist() == [len(lives) for lives in ticks(problem)]


@settings(max_examples=200)
@given(problems(most=12))
def test_the_load_at_every_time_is_that_of_the_live_buffers(problem):
    times, load = problem.load
    for t, naive in enumerate(naive_load(problem)):
        step = int(np.searchsorted(times, t, side="right")) - 1
        assert (int(load[step]) if step >= 0 else 0) == naive


@settings(max_examples=200)
@given(problems(most=12, least=1, sizes=SOLID))
def test_ranges_go_round_only_for_buffers_that_do(problem):
    sectioned = section(problem)
    for buffer, (first, last, again, end) in enumerate(sectioned.ranges.tolist()):
        assert 0 <= first < last <= sectioned.sections
        assert 0 <= again <= end <= sectioned.sections
        if again < end:
            assert problem.wraps[buffer]
            assert (again, last) == (0, sectioned.sections)
            assert end <= first


@settings(max_examples=200)
@given(problems(most=12))
def test_buffers_of_different_groups_never_meet(problem):
    groups = [group.tolist() for group in independent_groups(problem)]
    assert sorted(buffer for group in groups for buffer in group) == list(range(len(problem)))
    group_of = {buffer: number for number, group in enumerate(groups) for buffer in group}
    assert all(group_of[i] == group_of[j] for i, j in meetings(problem))


def test_idle_times_part_groups():
    groups = independent_groups(problem_of([(5, 6, 1), (0, 2, 1), (1, 3, 1), (3, 4, 1)]))
    assert [sorted(group.tolist()) for group in groups] == [[1, 2], [3], [0]]


# ---- the validator

BUFFERS = problem_of([(0, 4, 8), (2, 6, 8), (5, 9, 8), (1, 8, 8)], alignment=4)
RIGHT = placement_of(BUFFERS, [0, 8, 0, 16])


def test_a_right_placement_has_no_findings():
    assert validate(BUFFERS, RIGHT, capacity_bytes=24) == []


PLANTED = {
    "too few": (replace(RIGHT, offset=np.array([0, 8, 0])), [Finding(PlacementFault.COUNT)]),
    "too many": (replace(RIGHT, offset=np.array([0, 8, 0, 16, 0])), [Finding(PlacementFault.COUNT)]),
    "fractions": (
        replace(RIGHT, offset=np.array([0.0, 8.5, 0.0, 16.0])),
        [Finding(PlacementFault.NOT_AN_INTEGER, (buffer,)) for buffer in range(4)],
    ),
    "negative": (replace(RIGHT, offset=np.array([-4, 8, 0, 16])), [Finding(PlacementFault.NEGATIVE, (0,))]),
    "misaligned": (placement_of(BUFFERS, [0, 8, 0, 18]), [Finding(PlacementFault.MISALIGNED, (3,))]),
    "overlap": (placement_of(BUFFERS, [0, 4, 16, 24]), [Finding(PlacementFault.OVERLAP, (0, 1))]),
    "same place": (placement_of(BUFFERS, [0, 8, 16, 8]), [Finding(PlacementFault.OVERLAP, (1, 3))]),
    "peak": (replace(RIGHT, peak_bytes=20), [Finding(PlacementFault.PEAK, (3,))]),
    "bound": (replace(RIGHT, lower_bound_bytes=25), [Finding(PlacementFault.BOUND)]),
}


@pytest.mark.parametrize(("placement", "findings"), PLANTED.values(), ids=PLANTED)
def test_a_planted_fault_is_found_and_named(placement, findings):
    assert [
        f for f in validate(BUFFERS, placement) if f.fault is not PlacementFault.OVERLAP or f in findings
    ] == findings
    assert all(str(finding).startswith(finding.fault.value) for finding in findings)


def test_one_overlap_is_one_finding():
    assert validate(BUFFERS, placement_of(BUFFERS, [0, 4, 16, 24])) == [Finding(PlacementFault.OVERLAP, (0, 1))]


def test_a_capacity_that_is_passed_names_the_buffer():
    assert validate(BUFFERS, RIGHT, capacity_bytes=23) == [Finding(PlacementFault.CAPACITY, (3,))]


def test_a_finding_names_its_buffers():
    assert str(Finding(PlacementFault.OVERLAP, (0, 3))).endswith("(buffers 0, 3)")
    assert str(Finding(PlacementFault.PEAK, (2,))).endswith("(buffer 2)")
    assert str(Finding(PlacementFault.COUNT)) == PlacementFault.COUNT.value


@pytest.mark.parametrize(
    "rows",
    [[(8, 2, 4), (1, 3, 4)], [(1, 3, 4), (8, 2, 4)], [(9, 2, 4), (9, 1, 4)], [(5, 5, 4), (0, 1, 4)], [(3, 2, 4)] * 2],
)
def test_an_overlap_after_the_end_of_a_step_is_found(rows):
    problem = problem_of(rows, period=10)
    assert set(validate(problem, placement_of(problem, [0, 3]))) == {Finding(PlacementFault.OVERLAP, (0, 1))}
    assert validate(problem, placement_of(problem, [0, 4])) == []


def test_an_overlap_in_both_parts_of_a_step_is_one_finding():
    problem = problem_of([(8, 2, 4), (7, 3, 4)], period=10)
    assert validate(problem, placement_of(problem, [0, 3])) == [Finding(PlacementFault.OVERLAP, (0, 1))]


@settings(max_examples=300)
@given(problems(), st.data())
def test_the_validator_agrees_with_a_look_at_every_pair(problem, data):
    offset = [data.draw(st.integers(0, 20)) for _ in range(len(problem))]
    named = {finding.buffers for finding in validate(problem, placement_of(problem, offset))}
    wrong = overlaps(problem, offset)
    assert named <= wrong
    assert bool(named) == bool(wrong)


# ---- problems that are refused

ONE, TWO = np.array([1], np.int64), np.array([2], np.int64)

REFUSED = {
    "lengths": ({"size": np.array([1, 2])}, "1 births, 1 deaths and 2 sizes"),
    "negative size": ({"size": -ONE}, "buffer 0: size=-1"),
    "dies at birth": ({"upper": ONE}, "buffer 0: upper=1"),
    "dies before birth": ({"upper": 0 * ONE}, "buffer 0: upper=0"),
    "no alignment": ({"alignment": 0}, "alignment=0"),
    "negative alignment": ({"alignment": -8}, "alignment=-8"),
    "birth before the step": ({"lower": -ONE, "period": 4}, r"lower=-1, but births must be in \[0, 4\)"),
    "birth after the step": ({"lower": 4 * ONE, "period": 4}, r"lower=4, but births must be in \[0, 4\)"),
    "death before the step": ({"upper": -ONE, "period": 4}, r"upper=-1, but deaths must be in \[0, 4\]"),
    "death after the step": ({"upper": 5 * ONE, "period": 4}, r"upper=5, but deaths must be in \[0, 4\]"),
    "too large": ({"size": ONE * (MAX_BYTES + 1)}, "sum to more than"),
    "too large when padded": ({"size": ONE * MAX_BYTES, "alignment": 3}, "sum to more than"),
    "padded past 64 bits": ({"size": ONE * (2**63 - 1), "alignment": 4096}, "sum to more than"),
    "padded far past 64 bits": ({"alignment": 2**62}, "alignment=|sum to more than"),
    "alignment past 64 bits": ({"alignment": 2**64}, "alignment=|sum to more than"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_problem_is_refused_in_one_line(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        Problem(**{"lower": ONE, "upper": TWO, "size": ONE} | changes)
    assert "\n" not in str(caught.value)


def test_sizes_that_overflow_only_together_are_refused():
    with pytest.raises(ValueError, match="sum to more than"):
        problem_of([(time, time + 1, 2**62) for time in range(5)])


def test_the_first_wrong_buffer_is_named():
    with pytest.raises(ValueError, match="buffer 1: size=-2"):
        problem_of([(0, 1, 1), (0, 1, -2), (0, 1, -3)])


def test_the_largest_problem_is_placed():
    problem = problem_of([(0, 2, MAX_BYTES // 2 - 1), (1, 3, MAX_BYTES // 2 + 1)])
    placement = place(problem)
    assert placement.peak_bytes == placement.lower_bound_bytes == MAX_BYTES
    assert validate(problem, placement) == []


def test_times_at_both_ends_of_64_bits_are_placed():
    problem = problem_of([(-(2**63), 2**63 - 1, 2), (-(2**63), 0, 3), (0, 2**63 - 1, 3)])
    placement = place(problem)
    assert placement.peak_bytes == placement.lower_bound_bytes == 5
    assert validate(problem, placement) == []
