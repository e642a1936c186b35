"""Pipelines in bf16-mixed: each stage computes as a process without a pipeline does, with FSDP2's mixed precision.

Gradients of micro-batches are summed in fp32, as those of `accumulate_grad_batches`: the stages give, bit by bit, what
one process gives that trains one row after the other. They stay as near to fp32 as bf16 in one process does; see
`test_parallel_precision.py`.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from support.architectures.hybrids import make_hybrid
from support.devices import skip_ring_on_cuda
from support.markers.slow import slow_if
from support.parallel_training import Outcome, Run, train_alone, train_together
from support.samples.configurations import CONFIGURATIONS


def run_of(family: Any, **other: Any) -> Run:
    return Run(**{"family": family, "tokens": 45, "batch": 4, "layers": 4, "precision": "bf16-mixed"} | other)


@functools.lru_cache(maxsize=2)
def by_rows(run: Run, alpha: float) -> Outcome:
    """Train in one process, one row after the other: rows without ignored labels have equal weight."""
    rows = replace(run, batch=1, accumulate=run.batch * run.accumulate)
    return train_together(1, rows, {"zero_stage": 1, "alpha": alpha})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_gqa", "llama_tied", "llama_lora", "gemma3_mixed_windows"])
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("blocks", [1, 2])
def test_equals_one_process_that_trains_row_by_row(family: str, alpha: float, blocks: int) -> None:
    run = run_of(family, ignore=0.0)
    settings = {"pipeline_parallel_size": 2, "virtual_pipeline_size": blocks, "alpha": alpha}
    together, alone = train_together(2, run, settings), by_rows(run, alpha)
    # One process adds the gradients of an embedding and of a head that is tied to it in bf16, two stages in fp32.
    tied = {"model.model.embed_tokens.weight"} if family in ("llama_tied", "gemma3_mixed_windows") else set()
    for name, gradient in together.gradients.items():
        assert gradient.dtype == torch.float32
        if name in tied:
            error = float((gradient.cpu() - alone.gradients[name].cpu()).norm() / gradient.cpu().norm())
            assert 0 < error <= 2**-8
        else:
            assert torch.equal(gradient.cpu(), alone.gradients[name].cpu()), name
    assert together.losses == pytest.approx(alone.losses, rel=1e-4 if tied else 1e-6)
    if not tied:
        assert all(torch.equal(t.cpu(), alone.weights[name].cpu()) for name, t in together.weights.items())


class WatchMemory(Callback):
    """Notes what the plan of the last batch needs, and what was needed."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        memory = trainer.strategy.engine.memory
        self.notes = {"unplanned": memory.stats.unplanned_slots, "overflow": memory.stats.overflow_bytes}
        self.notes |= {"host": memory.host_bytes, "peak": memory.stats.peak_host_bytes}


def _distance(outcome: Outcome, exact: Outcome) -> float:
    """Relative error of the whole gradient."""
    squares = [(outcome.gradients[n].cpu().double() - g.double()).norm() ** 2 for n, g in exact.gradients.items()]
    return float(sum(squares) ** 0.5 / sum(g.double().norm() ** 2 for g in exact.gradients.values()) ** 0.5)


DIVIDED: dict[str, dict[str, Any]] = {
    "stages": {},
    "blocks": {"virtual_pipeline_size": 2},
    "dp2 zero0": {"zero_stage": 0},
    "dp2 zero1": {"zero_stage": 1},
    "blocks x dp2 zero1": {"zero_stage": 1, "virtual_pipeline_size": 2},
    "dp2 zero2": {"zero_stage": 2},
    "blocks x dp2 zero3": {"zero_stage": 3, "virtual_pipeline_size": 2},
    **{name: CONFIGURATIONS[name][1] for name in ("tp2", "tp2+sp", "cp2 ring", "cp2 ulysses")},
    "blocks x tp2+sp": {**CONFIGURATIONS["tp2+sp"][1], "virtual_pipeline_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_tied", "gemma3_mixed_windows", "llama_lora"])
@pytest.mark.parametrize("divided", DIVIDED)
def test_distance_to_fp32(divided: str, family: str) -> None:
    """The first gradient is at most 1.25 times as far from fp32 as that of one process in bf16-true."""
    run = run_of(family, padded=True, accumulate=2)
    settings = {"pipeline_parallel_size": 2, "alpha": 0.5} | DIVIDED[divided]
    skip_ring_on_cuda(settings)
    exact, alone = train_alone(replace(run, precision="32-true")), train_alone(replace(run, precision="bf16-true"))
    together = train_together(2 if divided in ("stages", "blocks") else 4, run, settings, watch=WatchMemory)
    assert _distance(together, exact) <= 1.25 * _distance(alone, exact)
    for loss, reference in zip(together.losses, exact.losses, strict=True):
        assert loss == pytest.approx(reference, rel=4e-3)  # bf16 keeps 8 bits
    notes = together.notes
    assert not any(notes["unplanned"]) and not any(notes["overflow"])
    assert all(0 <= host - peak <= host / 3 for host, peak in zip(notes["host"], notes["peak"], strict=True))


@slow_if(lambda family, layers, settings: family != "gemma3_dynamic_rope")
@pytest.mark.parametrize(
    ("family", "layers", "settings"),
    [
        ("llama_frozen_below", 6, {}),
        ("llama_frozen_below", 6, {"virtual_pipeline_size": 2, "pipeline_layers": [2, 1, 1, 2]}),
        ("llama_tied", 4, {"loss_chunk_tokens": 7, "plan_memory": True}),
        ("gemma3_dynamic_rope", 4, {}),
        ("mixtral", 4, {}),
        (functools.partial(make_hybrid, "BambaConfig", num_hidden_layers=4), 0, {}),
    ],
    ids=["frozen", "frozen block", "chunked loss", "rotary frequencies", "experts", "hybrid"],
)
def test_distance_to_fp32_of_other_models(family: Any, layers: int, settings: dict[str, Any]) -> None:
    run = run_of(family, layers=layers, steps=7 if "plan_memory" in settings else 3)
    exact, alone = train_alone(replace(run, precision="32-true")), train_alone(replace(run, precision="bf16-true"))
    together = train_together(2, run, {"pipeline_parallel_size": 2, "alpha": 0.5} | settings)
    assert _distance(together, exact) <= 1.25 * _distance(alone, exact)
    assert together.losses == pytest.approx(exact.losses, rel=4e-3)
