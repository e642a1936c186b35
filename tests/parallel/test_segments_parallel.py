"""Layers that several processes run again in segments, as their host is small: gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Trainer
from support.markers.slow import slow_if
from support.parallel_training import Run, train_alone, train_together

SETTINGS: dict[str, Any] = {"slice_tokens": 8, "stream_from_host": "hidden"}
BOUND = 2e-6  # of a weight's gradient, relative; rounding only


def plan_of(trainer: Trainer) -> dict[str, Any]:
    swap = trainer.strategy.plan.swap
    return {"host": swap.host_bytes, "again": swap.storage.calls_again, "segments": swap.storage.segment_calls}


@slow_if(lambda family, settings, size: settings != {"context_parallel_size": 2, "zero_stage": 3})
@pytest.mark.parametrize(
    ("family", "settings", "size"),
    [
        ("llama_gqa", {"context_parallel_size": 2, "zero_stage": 3}, 2),
        ("llama_gqa", {"context_parallel_size": 2, "zero_stage": 1}, 2),
        ("llama_gqa", {"zero_stage": 3}, 2),
        ("llama_gqa", {"zero_stage": 0}, 2),
        ("llama_gqa", {"tensor_parallel_size": 2}, 2),
        ("llama_gqa", {"context_parallel_size": 2, "ulysses_size": 2, "zero_stage": 3}, 4),
        ("qwen3_moe", {"expert_parallel_size": 2, "zero_stage": 3}, 4),
    ],
)
def test_gradients_are_those_of_one_process(family: str, settings: dict[str, Any], size: int) -> None:
    run = Run(family=family, tokens=56, accumulate=2, batch=4, layers=6, clip=0.1)
    settings = SETTINGS | settings
    ample = train_together(size, run, settings | {"alpha": 0}, after=plan_of)
    assert not any(ample.notes["again"])
    limit = int(0.6 * max(ample.notes["host"]) * size)  # for all processes of this host
    small = train_together(size, run, settings | {"host_memory": limit}, after=plan_of)
    assert all(again > 0 for again in small.notes["again"])
    assert len(set(small.notes["segments"])) == 1
    errors = small.worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in ("loss", "norm", "gradients")), errors
    assert small.losses == ample.losses
