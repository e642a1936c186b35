"""Bi-level and flat placement of training steps."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.paths import REFERENCE
from support.samples.plans import make, traces
from support.stacks.deep_traces import repeat_layers

from lightning_memo.artifacts.trace import NEVER, Trace
from lightning_memo.planner.placement import Placement, validate
from lightning_memo.planner.placement.step_placement import SHARES, place_bilevel, place_step, plan_memory, problem_of

RECORDED = REFERENCE / "llama_7_layers.csv"
"""Llama with the proportions of the 8B one (an eighth as wide) and seven layers, 2816 tokens, alpha 0.5, one thread."""


@pytest.fixture(scope="module")
def deep():
    return repeat_layers(Trace.load(RECORDED), 32)


@pytest.mark.slow
def test_a_step_of_32_layers_is_planned_at_its_lower_bound(deep):
    assert len(deep) > 10_000
    placement = plan_memory(deep, alignment=512, time_limit_seconds=10)
    assert validate(problem_of(deep, 512), placement) == []
    assert placement.peak_bytes <= 1.01 * placement.lower_bound_bytes


@pytest.mark.parametrize("share", [2.0, *SHARES])
def test_two_levels_come_close(deep, share):
    placement = place_bilevel(deep, alignment=512, share=share, time_limit_seconds=10)
    assert validate(problem_of(deep, 512), placement) == []
    assert placement.peak_bytes <= 1.05 * placement.lower_bound_bytes


@settings(max_examples=60)
@given(traces(), st.sampled_from([2.0, *SHARES]), st.sampled_from([1, 64]))
def test_two_levels_are_right_for_any_trace(trace, share, alignment):
    trace = replace(trace, size=trace.size % 4096)
    placement = place_bilevel(trace, alignment=alignment, share=share, time_limit_seconds=1)
    assert validate(problem_of(trace, alignment), placement) == []
    assert plan_memory(trace, alignment=alignment, time_limit_seconds=1).peak_bytes <= placement.peak_bytes


def test_a_placement_is_served_request_by_request():
    trace = make([0, 1, 1, 2], [100, 200, 300, 400], [2, 4, NEVER, 1], lane=[0, 0, 0, 1])
    placement = Placement(
        offset=np.array([512, 0]), peak_bytes=1024, lower_bound_bytes=1024, method="by hand", seconds=0.0
    )
    step = place_step(trace, placement, min_bytes=64, threads=1)
    assert [(phase.name, phase.sizes, phase.offsets) for phase in step.phases] == [
        ("input", (100,), (512,)),
        ("layer 0 forward", (200, 300), (0, -1)),
        ("layer 0 backward", (), ()),
    ]
    assert step.requests == 2


# A deep model's forward saves buffers that its backward frees in reverse order: all of them are alive at once.
PLACE_NESTED = """
import resource
import numpy as np
from lightning_memo.planner.placement import Problem, place

count = 4000
births = np.arange(count)
problem = Problem(lower=births, upper=2 * count - births, size=64 + births % 7)
place(Problem(lower=births[:9], upper=births[:9] + 9, size=births[:9] + 1), time_limit_seconds=1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
placement = place(problem, time_limit_seconds=60)
assert placement.optimal
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_grows_with_the_buffers_and_not_with_their_pairs():
    grown = subprocess.run([sys.executable, "-c", PLACE_NESTED], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 16 * 2**10, f"placing 4,000 buffers took {int(grown) / 2**10:.0f} MiB"
