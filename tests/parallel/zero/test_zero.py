"""ZeRO stages hold the bytes that they promise, and communicate as often as they have to, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from support.markers.slow import slow_if
from support.parallel_training import Outcome, Run, joined, train, train_alone, train_together
from support.processes import run_in_processes
from support.samples.collectives import EXPECTED, GATHER, RUN, Collectives
from support.trainer_harness import LanguageModel
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_memo.parallel.local_tensors import local_part


def _parameters(module: torch.nn.Module) -> list[Any]:
    """FSDP2's record of every parameter."""
    states = [m._get_fsdp_state() for m in module.modules() if isinstance(m, FSDPModule)]
    groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
    return [p for group in groups for p in group.fsdp_params]


def _gathered_bytes(module: torch.nn.Module) -> int:
    """Memory of whole weights, gathered for computing."""
    return sum(t.untyped_storage().nbytes() for p in _parameters(module) for t in p.all_gather_outputs)


def penalised(module: LanguageModel, batch: dict[str, Tensor]) -> Tensor:
    # Computed before the model, so that autograd comes to it when gradients of the layers have been reduced.
    squares = [p.float().square().sum() for p in module.parameters()]
    loss: Tensor = module.model(**batch).loss
    return loss + 0.01 * sum(t.full_tensor() if isinstance(t, DTensor) else t for t in squares)


def train_penalised(run: Run, settings: dict[str, Any]) -> Outcome:
    with mock.patch.object(LanguageModel, "loss", penalised):
        return train(run, settings)


SETTINGS = [{"zero_stage": 0}, {"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 3, "zero_shard_size": 2}]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_terms_of_the_loss_that_are_computed_from_weights(settings: dict[str, Any]) -> None:
    run = Run(family="llama_gqa", batch=4, layers=3)
    (alone,) = run_in_processes(1, train_penalised, run, {"alpha": 0.5})
    errors = joined(run_in_processes(4, train_penalised, run, settings | {"alpha": 0.5}), settings).worst_error(alone)
    assert all(error <= 1e-5 for error in errors.values()), errors
    assert alone.losses[0] > 1.5 * train_alone(run).losses[0]  # with the term


class EvaluatesBeforeStep(Callback):
    """Runs the model between the backward and the step of the optimizer."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    @override
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        with torch.no_grad():
            module.model(input_ids=torch.arange(16, device=module.device)[None])


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_an_evaluation_before_the_optimizers_step_leaves_no_old_weights(settings: dict[str, Any]) -> None:
    run = Run(family="llama_gqa", batch=4, precision="bf16-mixed" if settings["zero_stage"] == 0 else "32-true")
    outcome = train_together(4, run, settings, watch=EvaluatesBeforeStep)
    other = train_together(4, run, settings)
    assert outcome.losses == pytest.approx(other.losses, rel=1e-6)
    if run.precision == "32-true":
        errors = outcome.worst_error(train_alone(run))
        assert all(error <= 1e-5 for error in errors.values()), errors


class StateBytes(Callback):
    """Notes what this process holds at the points of a step where each kind is at its largest."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    @override
    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        self.notes["weights"] = _gathered_bytes(module)

    @override
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if trainer.fit_loop._should_accumulate():  # between two micro-batches
            whole = [p.unsharded_accumulated_grad for p in _parameters(module)]
            shards = [p.sharded_param.grad for p in _parameters(module)]
            self.notes["gradients"] = sum(local_part(t).nbytes for t in (*whole, *shards) if t is not None)

    @override
    def on_train_end(self, trainer: Any, module: Any) -> None:
        states = trainer.optimizers[0].state.values()
        kept = sum(local_part(p).nbytes for p in module.parameters())
        self.notes["kept weights"] = kept
        self.notes["moments"] = sum(local_part(s[name]).nbytes for s in states for name in ("exp_avg", "exp_avg_sq"))
        self.notes["count"] = sum(p.numel() for p in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_per_process_in_mixed_precision(stage: int, processes: int) -> None:
    """Of n parameters: bf16 weights 2n, fp32 gradients 4n, and 12n for the optimizer (fp32 weights, two moments).

    Stage 1 divides the 12n by the processes, stage 2 the 4n as well, stage 3 everything. At stage 3 the root is whole
    during a step; gradients that wait for the last micro-batch are whole at stages 0 and 1.
    """
    run = Run(**{**RUN.__dict__, "precision": "bf16-mixed", "batch": processes})
    notes = train_together(processes, run, {"zero_stage": stage, "alpha": 0.5}, watch=StateBytes).notes
    n, root = notes["count"][0], 2 * 96 * 32 + 32
    for rank in range(processes):
        held = {name: values[rank] for name, values in notes.items()}
        assert held["weights"] == 2 * (root if stage == 3 else n)
        assert held["gradients"] == 4 * n // (processes if stage >= 2 else 1)
        assert held["kept weights"] + held["moments"] == 12 * n // (processes if stage >= 1 else 1)


@slow_if(lambda stage: stage in (1, 2))
@pytest.mark.parametrize("stage", EXPECTED)
def test_collectives_of_an_optimizer_step(stage: int) -> None:
    """Two micro-batches: reduced once at stages 0 and 1, weights gathered once at 1 and 2."""
    notes = train_together(2, RUN, {"zero_stage": stage, "alpha": 0.5}, watch=Collectives).notes
    for counts in notes["counts"]:
        assert dict(+counts) == EXPECTED[stage]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "forwards", "backwards"), [("llama_frozen_below", 3, 1), ("llama_with_reference", 6, 3)]
)
def test_weights_are_gathered_for_backwards_that_come(family: str, forwards: int, backwards: int) -> None:
    run = replace(RUN, family=family, layers=3)
    notes = train_together(2, run, {"zero_stage": 3, "alpha": 0.5}, watch=Collectives).notes
    for counts in notes["counts"]:
        assert counts[GATHER] == (1 + forwards + backwards) * RUN.accumulate


class HalvedGradients(Callback):
    """Halves the gradients that it sees behind each backward, and notes their number."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {"seen": []}

    @override
    def on_after_backward(self, trainer: Any, module: Any) -> None:
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        self.notes["seen"].append(len(gradients))
        for gradient in gradients:
            gradient.mul_(0.5)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
def test_hooks_see_gradients_between_micro_batches(stages: int) -> None:
    """With ZeRO 2, too, for which FSDP2 keeps whole weights in the places of the parameters."""
    settings = {"alpha": 0.5, "pipeline_parallel_size": stages}
    first, second = (
        train_together(2 * stages, RUN, {**settings, "zero_stage": stage}, watch=HalvedGradients) for stage in (1, 2)
    )
    assert first.notes["seen"] == second.notes["seen"]
    assert all(seen and min(seen) == max(seen) > 0 for seen in second.notes["seen"])
    assert max(second.worst_error(first).values()) <= 1e-6
