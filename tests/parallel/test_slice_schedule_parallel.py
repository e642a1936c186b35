"""The whole model slice by slice in several processes: gradients of one process, and collectives once a step."""

from __future__ import annotations

from typing import Any

import pytest
from support.architectures.mixtures import lopsided
from support.markers.slow import slow_if
from support.parallel_training import Run, train_alone, train_together
from support.samples.collectives import EXPECTED, Collectives
from support.samples.collectives import RUN as COUNTED

from lightning_memo import MemoStrategy
from lightning_memo.engine import TestMode

SETTINGS: dict[str, Any] = {"stream_from_host": "model", "alpha": 0.5, "test_mode": TestMode(5, 0.0005)}
BOUND = 2e-6  # of a weight's gradient, relative; rounding only


@slow_if(lambda stage: stage < 2)
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_are_those_of_one_process(stage: int) -> None:
    run = Run(family="llama_gqa", tokens=29, accumulate=2, batch=2, steps=2, clip=0.1)
    together = train_together(2, run, SETTINGS | {"zero_stage": stage, "slice_tokens": 8})
    errors = together.worst_error(train_alone(run))
    assert all(error <= BOUND for error in errors.values()), errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "size", "stage"), [("qwen3_moe", 2, 0), ("qwen3_moe", 2, 1), (lopsided, 2, 2), ("qwen3_moe", 4, 2)]
)
def test_experts_that_processes_share(family: Any, size: int, stage: int) -> None:
    """Each slice sends its tokens to the processes that hold their experts. Some batches are a single slice."""
    run = Run(family=family, lengths=(90, 21, 64, 45), accumulate=2, batch=4, steps=2, layers=3, clip=0.1)
    settings = SETTINGS | {"zero_stage": stage, "slice_tokens": 32, "expert_parallel_size": 2}
    errors = train_together(size, run, settings).worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in ("loss", "norm", "gradients")), errors


@pytest.mark.slow
def test_gradients_in_mixed_precision() -> None:
    run = Run(family="llama", tokens=29, batch=2, steps=2, precision="bf16-mixed", layers=2)
    sliced = train_together(2, run, SETTINGS | {"zero_stage": 1, "slice_tokens": 8})
    plain = train_alone(run)
    assert sliced.worst_error(plain)["gradients"] <= 0.05


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_collectives_of_an_optimizer_step(stage: int) -> None:
    """However many slices: what the stage does without any."""
    settings = SETTINGS | {"zero_stage": stage, "slice_tokens": 5}
    notes = train_together(2, COUNTED, settings, watch=Collectives).notes
    for counts in notes["counts"]:
        assert dict(+counts) == EXPECTED[stage]


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"zero_stage": 3}, "zero_stage=3"), ({"context_parallel_size": 2}, "context_parallel_size=2")],
)
def test_what_would_send_in_every_slice_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f'stream_from_host="model" contradicts {named}'):
        MemoStrategy(stream_from_host="model", slice_tokens=8, **settings)


@pytest.mark.slow
def test_hidden_states_on_the_host_in_mixed_precision() -> None:
    """FSDP2 casts what layers get: hidden states and rotary tables that are not there yet."""
    run = Run(family="llama_gqa", tokens=29, batch=2, steps=3, precision="bf16-mixed", layers=2)
    settings = {"slice_tokens": 8, "stream_from_host": "hidden", "zero_stage": 3, "alpha": 0.5}
    assert train_together(2, run, settings).worst_error(train_alone(run))["gradients"] <= 0.05
