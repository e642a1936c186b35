"""Layers that several processes run again in segments, as their host is small: gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
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


@pytest.mark.slow
def test_longer_batches_that_processes_share_may_need_segments() -> None:
    run = Run(family="llama_gqa", lengths=(24, 56, 40), batch=2, layers=6, steps=4)
    settings = SETTINGS | {"context_parallel_size": 2, "zero_stage": 3}
    ample = train_together(2, run, settings | {"alpha": 0}, after=plan_of)
    limit = int(0.6 * max(ample.notes["host"]) * 2)
    small = train_together(2, run, settings | {"host_memory": limit}, after=plan_of, watch=Plans)
    assert [again > 0 for again in small.notes["of_batches"][0]] == [False, True, True, True]
    assert small.notes["of_batches"][0] == small.notes["of_batches"][1]
    errors = small.worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in ("loss", "norm", "gradients")), errors


class Plans(Callback):
    """Notes how many layer calls run again after each batch."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {"of_batches": []}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.notes["of_batches"].append(trainer.strategy.plan.swap.storage.calls_again)
