"""Training in the zero-bubble order gives the gradients of 1F1B to the last bit, and what one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from support.devices import skip_ring_on_cuda
from support.markers.slow import slow_if
from support.parallel_training import Outcome, Run, train_alone, train_together
from support.samples.configurations import BOUND

from lightning_memo.engine import TestMode

ZERO_BUBBLE = {"pipeline_schedule": "zero_bubble"}


class WatchWaiting(Callback):
    """Notes what the plan of the last batch keeps for the gradients of weights that wait."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        engine, plan = trainer.strategy.engine, trainer.strategy.plan
        self.notes = {"waiting": engine.micro_batches.waiting_bytes, "in_use": engine.slots_in_use}
        self.notes["alpha"] = plan.swap.alpha


def run_of(**other: Any) -> Run:
    return Run(**{"family": "llama_tied", "tokens": 45, "batch": 4, "layers": 4, "steps": 3, "clip": 0.5} | other)


def check_alone(outcome: Outcome, run: Run) -> None:
    errors = outcome.worst_error(train_alone(run))
    assert all(error <= BOUND for error in errors.values()), errors


def check(run: Run, settings: dict[str, Any], stages: int = 2, processes: int = 2) -> Outcome:
    skip_ring_on_cuda(settings)
    sizes = {"pipeline_parallel_size": stages, "attention": "sdpa"}  # "auto" depends on times
    usual = train_together(processes, run, sizes | settings)
    outcome = train_together(processes, run, sizes | settings | ZERO_BUBBLE, watch=WatchWaiting)
    assert outcome.losses == usual.losses
    for kind in ("gradients", "weights"):
        pairs = [(t, getattr(usual, kind)[name]) for name, t in getattr(outcome, kind).items()]
        assert pairs and all(torch.equal(a, b) for a, b in pairs), kind
    assert outcome.notes["in_use"] == [0] * processes
    return outcome


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_equals_1f1b(alpha: float) -> None:
    run = run_of(accumulate=2)
    outcome = check(run, {"alpha": alpha})
    check_alone(outcome, run)
    first, last = outcome.notes["waiting"]
    assert first == 0 < last


COMBINED = {
    "3 stages": ({}, {"layers": 6}, 3, 3),
    "2 blocks": ({"virtual_pipeline_size": 2}, {"layers": 8, "batch": 5}, 2, 2),
    "tp": ({"tensor_parallel_size": 2}, {}, 2, 4),
    "cp": ({"context_parallel_size": 2}, {}, 2, 4),
    "ulysses": ({"context_parallel_size": 2, "ulysses_size": 2}, {}, 2, 4),
    "zero 0": ({"zero_stage": 0}, {"batch": 8}, 2, 4),
    "zero 1": ({"zero_stage": 1}, {"batch": 8, "accumulate": 2}, 2, 4),
    "experts": ({"expert_parallel_size": 2, "zero_stage": 1}, {"family": "mixtral", "batch": 8}, 2, 4),
    "int8": ({"zero_stage": 1, "zero_communication": "int8"}, {"batch": 8}, 2, 4),
    "micro-batches of 2": ({"micro_batch_size": 2}, {}, 2, 2),
    "1 micro-batch": ({}, {"batch": 1}, 2, 2),
    "biases": ({}, {"family": "qwen2"}, 2, 2),
    "adapters": ({}, {"family": "llama_lora"}, 2, 2),
    "bf16-mixed": ({}, {"precision": "bf16-mixed"}, 2, 2),
    "bf16-mixed zero 1": ({"zero_stage": 1}, {"precision": "bf16-mixed", "batch": 8}, 2, 4),
    "bf16-mixed tp": ({"tensor_parallel_size": 2}, {"precision": "bf16-mixed"}, 2, 4),
    "bf16-true zero 1": ({"zero_stage": 1}, {"precision": "bf16-true", "batch": 8, "accumulate": 2}, 2, 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINED)
def test_combined(name: str) -> None:
    settings, run, stages, processes = COMBINED[name]
    waiting = check(run_of(**run), {"alpha": 0.5} | settings, stages, processes).notes["waiting"]
    assert [size > 0 for size in waiting] == [rank >= processes // stages for rank in range(processes)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_tied", "gemma3_mixed_windows"])
def test_a_place_for_each_kind_of_tensor(family: str) -> None:
    budget = {"device_memory": "2000KiB", "host_memory": "600KiB"}
    delays = {"test_mode": TestMode(5, 0.0005, plans="kinds")}
    run = run_of(family=family, layers=8, batch=6)
    sizes = {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}
    outcome = train_together(2, run, sizes | budget | delays | ZERO_BUBBLE, watch=WatchWaiting)
    check_alone(outcome, run)
    assert outcome.notes["in_use"] == [0, 0] and outcome.notes["waiting"][1] > 0
