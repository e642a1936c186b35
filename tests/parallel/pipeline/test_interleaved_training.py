"""Training in interleaved pipelines gives what training in one process gives; see `test_pipeline_training.py`."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from support.devices import skip_ring_on_cuda
from support.parallel_training import Run, train_alone, train_together
from support.processes import ProcessError
from support.samples.configurations import BOUND

from lightning_memo import MemoStrategy
from lightning_memo.engine import TestMode
from lightning_memo.parallel.pipeline.stage_order import most_in_flight

PARTS = ("loss", "norm", "gradients", "weights")


class WatchLanes(Callback):
    """Notes what the plan of the last batch needs, and what was needed."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        engine, plan = trainer.strategy.engine, trainer.strategy.plan
        self.notes = {"calls": plan.swap.calls, "alpha": plan.swap.alpha, "in_use": engine.slots_in_use}
        self.notes["budget"] = plan.budget.host_bytes
        if engine.memory is not None:
            stats = engine.memory.stats
            self.notes |= {"unplanned": stats.unplanned_slots, "overflow": stats.overflow_bytes}
            self.notes |= {"host": engine.memory.host_bytes, "peak": stats.peak_host_bytes}


def run_of(family: str = "llama_gqa", layers: int = 8, **other: Any) -> Run:
    return Run(**({"family": family, "tokens": 45, "batch": 4, "layers": layers, "steps": 3, "clip": 0.5} | other))


def check(run: Run, settings: dict[str, Any], stages: int = 2, processes: int | None = None) -> dict[str, list[Any]]:
    skip_ring_on_cuda(settings)
    all_settings = {"pipeline_parallel_size": stages, "virtual_pipeline_size": 2} | settings
    outcome = train_together(processes or stages, run, all_settings, watch=WatchLanes)
    errors = outcome.worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in PARTS), errors
    return outcome.notes


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_equals_one_process_at_every_alpha(alpha: float, accumulate: int) -> None:
    notes = check(run_of(accumulate=accumulate), {"alpha": alpha})
    # Each block of two layers has ranges for its micro-batches in flight, not all of which are at their most at once.
    lanes = [sum(most_in_flight(stage, 2, 2)) for stage in range(2)]
    assert notes["calls"] == [2 * number for number in lanes]
    assert notes["in_use"] == [0, 0] and notes["unplanned"] == notes["overflow"] == [0, 0]
    assert all(0 <= host - peak <= host / 3 for host, peak in zip(notes["host"], notes["peak"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["llama_tied", "gemma3_mixed_windows", "llama_lora", "gemma", "qwen3", "llama_frozen_below", "mixtral"]
)
def test_kinds_of_models(family: str) -> None:
    # Of llama_frozen_below, the first two layers are frozen, which are the first block of two.
    settings = {"pipeline_layers": [2, 1, 1, 2]} if family == "llama_frozen_below" else {}
    check(run_of(family, layers=6 if settings else 4, accumulate=2), {"alpha": 0.5} | settings)


@pytest.mark.slow
def test_three_stages_three_blocks_delays_and_poison() -> None:
    """Five micro-batches are no multiple of three stages."""
    settings = {"alpha": 0.5, "virtual_pipeline_size": 3, "pipeline_layers": [1, 1, 2, 1, 1, 1, 1, 1, 1]}
    settings |= {"test_mode": TestMode(5, 0.0005)}
    notes = check(run_of(layers=10, batch=5), settings, stages=3)
    assert notes["in_use"] == [0, 0, 0] and notes["unplanned"] == notes["overflow"] == [0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 3, 7])
def test_any_number_of_micro_batches(batch: int) -> None:
    check(run_of(batch=batch), {"alpha": 0.5})


@pytest.mark.slow
def test_chunked_loss_and_planned_memory() -> None:
    check(run_of("llama_tied", 4, steps=7), {"alpha": 0.5, "loss_chunk_tokens": 7, "plan_memory": True})


@pytest.mark.slow
def test_longer_batches_are_profiled_again() -> None:
    check(run_of(lengths=(48, 24, 60), steps=4), {"alpha": 0.5})


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"zero_stage": 1},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "sequence_parallel": False},
        {"context_parallel_size": 2},
        {"context_parallel_size": 2, "ulysses_size": 2},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "data",
)
def test_beside_other_parallelism(settings: dict[str, Any]) -> None:
    check(run_of("llama_tied", 4, accumulate=2), {"alpha": 0.5} | settings, processes=4)


@pytest.mark.slow
def test_plain_training_where_memory_is_ample() -> None:
    check(run_of(), {})


@pytest.mark.slow
def test_a_small_host_budget_holds() -> None:
    notes = check(run_of(), {"device_memory": "1MiB", "host_memory": "1MiB"})
    assert all(0 < alpha < 1 for alpha in notes["alpha"])
    assert all(host <= budget for host, budget in zip(notes["host"], notes["budget"], strict=True))
    assert notes["unplanned"] == notes["overflow"] == [0, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"virtual_pipeline_size": 2}, "virtual_pipeline_size=2 is for a pipeline"),
        (
            {"virtual_pipeline_size": 0, "pipeline_parallel_size": 2},
            "=0 is not a number of blocks of layers",
        ),
        (
            {"virtual_pipeline_size": 2, "pipeline_parallel_size": 2, "pipeline_layers": [4, 4]},
            "virtual_pipeline_size=2: give 4 numbers",
        ),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MemoStrategy(**settings)


def test_more_blocks_than_layers_are_refused() -> None:
    with pytest.raises(ProcessError, match="x virtual_pipeline_size=3 is more than the 4 layers"):
        train_together(2, run_of(layers=4), {"pipeline_parallel_size": 2, "virtual_pipeline_size": 3})
