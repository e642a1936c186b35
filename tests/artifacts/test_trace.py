"""Traces: their derived columns, their CSV files, and how they are made from the allocator's events."""

import numpy as np
import pytest
from hypothesis import given
from support.samples.plans import make, traces

from lightning_memo.allocator import EVENT, FREE, MALLOC
from lightning_memo.artifacts.trace import NEVER, Trace
from lightning_memo.planner.placement.step_placement import problem_of
from lightning_memo.runtime.request_recording import RecordedStep, StepPhases, trace_of

STEP = make(phase=[0, 1, 1, 2], size=[100, 200, 300, 400], death=[2, 4, NEVER, 1])


def test_columns_that_follow_from_the_others():
    assert STEP.sequence.tolist() == [0, 0, 1, 0]
    assert STEP.phase_start.tolist() == [0, 1, 3, 4]
    assert STEP.death_phase.tolist() == [1, 2, NEVER, 0]
    assert STEP.layer_of_phase.tolist() == [-1, 0, 0]
    assert STEP.planned.tolist() == [0, 1, 3]


def test_a_buffer_that_dies_in_the_next_step_wraps():
    problem = problem_of(STEP, 64)
    assert problem.lower.tolist() == [0, 1, 3]
    assert problem.upper.tolist() == [2, 4, 1]
    assert problem.wraps.tolist() == [False, False, True]
    assert problem.period == 4
    assert problem.lower_bound_bytes == 256 + 448  # what is born last meets what is born first


def test_what_dies_before_the_next_step_does_not_wrap():
    assert problem_of(make([0, 1], [8, 8], [1, 0]), 1).upper.tolist() == [1, 2]


def test_other_streams_have_no_place():
    trace = make([0, 0, 1], [1, 2, 3], [1, 2, 3], lane=[0, 1, 0])
    assert trace.planned.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": np.array([1, -2, 3, 4])}, "request 1: size=-2"),
        ({"phase": np.array([0, 1, 0, 2])}, "request 2: phase=0"),
        ({"phase": np.array([0, 1, 1, 3])}, "request 3: phase=3"),
        ({"death": np.array([2, 5, -1, 1])}, "request 1: death=5"),
        ({"lane": np.array([0, 0, -1, 0])}, "request 2: lane=-1"),
        ({"lane": np.array([0])}, "columns have"),
    ],
)
def test_impossible_values_are_refused(change, message):
    columns = {name: getattr(STEP, name) for name in ("phases", "phase", "size", "death", "lane")}
    with pytest.raises(ValueError, match=message):
        Trace(**columns | change)


def test_the_longer_of_two_lives_counts():
    early, late = make([0, 0], [8, 8], [1, 0]), make([0, 0], [8, 8], [2, 1])
    assert early.longest_lives(late).death.tolist() == [2, 1]
    never = make([0, 0], [8, 8], [NEVER, 0])
    assert early.longest_lives(never).death.tolist() == [NEVER, 0]


@pytest.mark.slow
@given(traces())
def test_a_file_holds_all_of_a_trace(tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    trace.save(path)
    again = Trace.load(path)
    assert again.same_requests(trace)
    assert np.array_equal(again.death, trace.death)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("trace 1", "trace 9", "the first line does not begin with"),
        ("sequence", "order", "the second line is not"),
        ("300", "many", "line 5: size='many' is not a 64-bit integer"),
        ("300", str(2**70), "line 5: size="),
        ("200,", "200", "line 4: 8 values for 9 columns"),
        ("2,0,layer 0 forward", "2,0,nowhere", "line 5: phase 'nowhere' is not one of those in the first line"),
        ("300", "-300", "request 2: size=-300"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_line(tmp_path, old, new, message):
    path = tmp_path / "trace.csv"
    STEP.save(path)
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message) as refused:
        Trace.load(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_binary_file_is_no_trace(tmp_path):
    (tmp_path / "trace.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not a trace"):
        Trace.load(tmp_path / "trace.csv")


# ---- phases and events


def test_a_phase_that_comes_again_has_another_number():
    begun = []
    phases = StepPhases(begun.append)
    for _ in range(2):
        phases.begin_step()
        for name in ("input", "backward", "input", "backward"):
            phases.mark(name)
    assert begun == [0, 1, 2, 3] * 2
    assert phases.names == ("input", "backward", "input 2", "backward 2")


def test_known_phases_keep_their_numbers():
    begun = []
    phases = StepPhases(begun.append, ["backward", "input"])
    for name in ("input", "other", "backward"):
        phases.mark(name)
    assert begun == [1, 2, 0]


def step(*events, order=(0, 1, 2)):
    """Events as `(kind, phase, sequence, id, size)`."""
    rows = [(kind, phase, sequence, 0, own, size, 0, 0) for kind, phase, sequence, own, size in events]
    return RecordedStep(np.array(rows, EVENT), order)


NAMES = ("input", "layer 0 forward", "layer 0 backward")
NOTHING = step()


def test_births_and_deaths_count_requests():
    recorded = step(
        (MALLOC, 0, 0, 10, 8), (MALLOC, 1, 0, 11, 16), (FREE, 1, 1, 10, 8), (MALLOC, 1, 1, 12, 24),
        (FREE, 2, 0, 12, 24), (MALLOC, 2, 0, 13, 32), (FREE, 2, 1, 11, 16), (FREE, -1, -1, 13, 32),
    )  # fmt: skip
    trace = trace_of(recorded, NOTHING, NAMES)
    assert trace.size.tolist() == [8, 16, 24, 32]
    assert trace.phase.tolist() == [0, 1, 1, 2]
    assert trace.death.tolist() == [2, 4, 3, 4]


def test_a_buffer_freed_at_once_lives_for_one_request():
    trace = trace_of(step((MALLOC, 0, 0, 1, 8), (FREE, 0, 1, 1, 8), (MALLOC, 0, 1, 2, 8)), NOTHING, NAMES)
    assert trace.death.tolist() == [1, NEVER]


def test_deaths_in_the_next_step_are_told_by_phase():
    mallocs = [(MALLOC, 0, 0, 1, 8), (MALLOC, 1, 0, 2, 8), (MALLOC, 1, 1, 3, 8), (MALLOC, 2, 0, 4, 8)]
    following = step(
        (FREE, -1, -1, 1, 8),  # between the steps: at the end of this one
        (MALLOC, 0, 0, 5, 99), (FREE, 1, 0, 3, 8), (FREE, 1, 1, 4, 8), (FREE, 2, 0, 2, 8),
    )  # fmt: skip
    trace = trace_of(step(*mallocs), following, NAMES)
    assert trace.death.tolist() == [4, NEVER, 1, 2]  # the second lives for more than a step


def test_what_is_freed_after_the_next_step_never_dies():
    trace = trace_of(step((MALLOC, 0, 0, 1, 8)), step((MALLOC, 0, 0, 2, 8), (FREE, -1, -1, 1, 8)), NAMES)
    assert trace.death.tolist() == [NEVER]


def test_a_death_in_a_phase_without_requests_is_where_the_phase_was():
    recorded = step((MALLOC, 0, 0, 1, 8), (FREE, 1, 0, 1, 8), (MALLOC, 2, 0, 2, 8), (FREE, -1, -1, 2, 8))
    assert trace_of(recorded, NOTHING, NAMES).death.tolist() == [1, 2]


def test_requests_of_other_streams_are_in_lanes_of_their_own():
    events = step((MALLOC, 0, 0, 1, 8), (MALLOC, 0, -1, 2, 8), (MALLOC, 0, 1, 3, 8), (FREE, 0, 1, 1, 8))
    events.events["stream"] = [0, 7, 0, 0]
    trace = trace_of(events, NOTHING, NAMES)
    assert trace.lane.tolist() == [0, 1, 0]
    assert trace.death.tolist() == [2, NEVER, NEVER]
