"""Bi-level and flat placement of training steps, and extrapolated traces."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.families import _LLAMA_LIKE, _hf
from support.paths import REFERENCE
from support.samples.callbacks import Watch
from support.samples.plans import make, traces
from support.trainer_harness import LanguageModel, fit, loader, shorten_measurements

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.trace import NEVER, Trace
from lightning_memo.planner.placement import Placement, validate
from lightning_memo.planner.placement.extrapolate import ExtrapolationError, extrapolate, repeat_layers
from lightning_memo.planner.placement.step_placement import SHARES, place_bilevel, place_step, plan_memory, problem_of
from lightning_memo.runtime.memory_plans import memory_planner as planning

RECORDED = REFERENCE / "llama_7_layers.csv"
"""Llama with the proportions of the 8B one (an eighth as wide) and seven layers, 2816 tokens, alpha 0.5, one thread."""


@pytest.fixture(scope="module")
def deep():
    return repeat_layers(Trace.load(RECORDED), 32)


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


# ---- longer and deeper


class WithoutMomentum(LanguageModel):
    """Train with SGD, whose optimizer step needs no scratch memory that grows with the layers."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def record(monkeypatch, tmp_path):
    shorten_measurements(monkeypatch)
    monkeypatch.setattr(planning, "cache_folder", lambda: tmp_path / "plans")
    monkeypatch.setattr(planning, "MIN_BYTES", 1)

    def run(layers=4, tokens=32, alpha=0.5):
        config = _LLAMA_LIKE | {"num_hidden_layers": layers, "max_position_embeddings": 4096}
        memo = MemoStrategy(alpha=alpha)
        module = WithoutMomentum(_hf("LlamaConfig", **config))
        fit(memo, module, loader(24, tokens), max_steps=9, callbacks=[Watch()], default_root_dir=tmp_path)
        return memo.memory.trace

    return run


def test_repeated_layers_equal_recorded_ones(record):
    repeated, recorded = repeat_layers(record(layers=7), 10), record(layers=10)
    assert repeated.same_requests(recorded)
    assert np.array_equal(repeated.death, recorded.death)


def test_an_extrapolated_length_equals_the_recorded_one(record):
    lengths = (832, 896, 1024)
    extrapolated = extrapolate(tuple(record(tokens=length, alpha=0.0) for length in lengths), lengths, 1152)
    recorded = record(tokens=1152, alpha=0.0)
    assert extrapolated.same_requests(recorded)
    assert np.array_equal(extrapolated.death, recorded.death)


SHORT = make([0, 1], [10, 20], [1, 2])


def test_a_size_that_does_not_grow_evenly_is_named():
    middle, long = replace(SHORT, size=np.array([20, 25])), replace(SHORT, size=np.array([30, 40]))
    with pytest.raises(ExtrapolationError, match=r"request 1 \(layer 0 forward\) has 25 bytes at 20 tokens"):
        extrapolate((SHORT, middle, long), (10, 20, 30), 100)


def test_a_size_between_bytes_is_rounded_up():
    long = replace(SHORT, size=np.array([13, 20]))
    assert extrapolate((SHORT, replace(SHORT, size=np.array([12, 20])), long), (10, 15, 20), 11).size.tolist() == [
        11,
        20,
    ]


def test_steps_that_differ_can_not_be_extrapolated():
    other = make([0, 0], [10, 20], [1, 2])
    with pytest.raises(
        ExtrapolationError, match="the steps of 1 and 3 tokens do not allocate and free memory in the same order"
    ):
        extrapolate((SHORT, SHORT, other), (1, 2, 3), 4)


def test_lengths_must_ascend():
    with pytest.raises(ExtrapolationError, match="three ascending numbers"):
        extrapolate((SHORT, SHORT, SHORT), (3, 2, 1), 4)


@pytest.mark.parametrize("layers", [5, 3])
def test_too_few_layers_can_not_be_repeated(layers):
    with pytest.raises(ExtrapolationError, match="record at least 7"):
        repeat_layers(SHORT, layers)
