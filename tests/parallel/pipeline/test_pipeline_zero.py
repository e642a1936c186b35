"""ZeRO 2 and 3 beside pipelines give what training in one process gives, and communicate for each micro-batch."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from support.devices import DEVICE, skip_ring_on_cuda
from support.markers.slow import slow_if
from support.parallel_training import Run, train, train_alone, train_together
from support.processes import run_in_processes
from support.samples.collectives import GATHER, RUN, SCATTER, Collectives
from support.samples.configurations import BOUND, CONFIGURATIONS
from support.trainer_harness import LanguageModel
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_memo.engine import TestMode
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.parallel.parallel_sizes import ParallelSizes
from lightning_memo.parallel.pipeline.pipeline_gradients import ReducedGradient
from lightning_memo.parallel.pipeline.pipeline_messages import BatchAgreement

PARTS = ("loss", "norm", "gradients", "weights")
STEPS, MICRO_BATCHES = 3, 2


def run_of(family: str = "llama_tied", **other: Any) -> Run:
    return Run(**{"family": family, "tokens": 45, "batch": 4, "layers": 4, "steps": STEPS, "clip": 0.5} | other)


def check(run: Run, settings: dict[str, Any], processes: int = 4, watch: Any = None) -> dict[str, list[Any]]:
    skip_ring_on_cuda(settings)
    outcome = train_together(processes, run, {"pipeline_parallel_size": 2, "alpha": 0.5} | settings, watch=watch)
    errors = outcome.worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in PARTS), errors
    return outcome.notes


class WatchWhole(Callback):
    """Counts whole gradients and whole weights of layers that FSDP2 keeps when the backwards of a batch are over."""

    def __init__(self) -> None:
        self.notes = {"gradients": 0, "weights": 0}

    def on_before_backward(self, trainer: Trainer, module: LightningModule, loss: Tensor) -> None:
        states = [layer._get_fsdp_state() for layer in module.model.model.layers if isinstance(layer, FSDPModule)]
        for of in (p for state in states for p in state._fsdp_param_group.fsdp_params):
            self.notes["gradients"] += of.unsharded_accumulated_grad is not None or of._unsharded_param.grad is not None
            self.notes["weights"] += local_part(of._unsharded_param).untyped_storage().size() > 0


@slow_if(lambda zero_stage, blocks, accumulate: (zero_stage, blocks, accumulate) != (3, 2, 2))
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_equals_one_process(zero_stage: int, blocks: int, accumulate: int) -> None:
    """No process has whole gradients after a batch, nor with ZeRO 3 whole weights of layers."""
    settings = {"zero_stage": zero_stage, "virtual_pipeline_size": blocks}
    notes = check(run_of(accumulate=accumulate), settings, watch=WatchWhole)
    assert not any(notes["gradients"])
    assert not any(notes["weights"]) if zero_stage == 3 else all(notes["weights"])


@pytest.mark.slow
@pytest.mark.parametrize("divided", ["tp2", "tp2+sp", "cp2 ring", "cp2 ulysses"])
@pytest.mark.parametrize(("zero_stage", "blocks"), [(2, 1), (3, 1), (3, 2)])
def test_beside_tensor_and_context_parallelism(divided: str, zero_stage: int, blocks: int) -> None:
    settings = CONFIGURATIONS[divided][1] | {"zero_stage": zero_stage, "virtual_pipeline_size": blocks}
    check(run_of(padded=True, accumulate=2), settings)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize("family", ["llama_lora", "llama_frozen_below", "gemma3_mixed_windows", "mixtral", "qwen3"])
def test_kinds_of_models(family: str, zero_stage: int) -> None:
    layers = {"layers": 6, "batch": 8} if family == "llama_frozen_below" else {}
    check(run_of(family, **layers), {"zero_stage": zero_stage})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "settings"),
    [
        (2, {}),
        (4, {"pipeline_parallel_size": 4}),
        (4, {"alpha": 0.0}),
        (4, {"alpha": 1.0}),
        (4, {"loss_chunk_tokens": 7, "plan_memory": True}),
        (4, {"test_mode": TestMode(5, 0.0005)}),
    ],
    ids=str,
)
def test_zero3_beside_other_settings(processes: int, settings: dict[str, Any]) -> None:
    check(run_of(steps=7 if "plan_memory" in settings else STEPS), settings | {"zero_stage": 3}, processes)


@pytest.mark.slow
@pytest.mark.parametrize(("zero_stage", "blocks"), [(2, 2), (3, 1), (3, 2)])
def test_all_pipelines_run_one_by_one_if_one_of_them_profiles(zero_stage: int, blocks: int) -> None:
    """Only the rows of the second pipeline grow."""
    check(run_of(growing=True), {"zero_stage": zero_stage, "virtual_pipeline_size": blocks})


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [2, 3])
def test_collectives_of_a_step(zero_stage: int) -> None:
    """Each of two stages has a layer, and the embedding or the head around it, whose weights stay gathered."""
    settings = {"pipeline_parallel_size": 2, "zero_stage": zero_stage, "alpha": 0.5}
    counts = train_together(4, RUN, settings, watch=Collectives).notes["counts"]
    micro_batches = MICRO_BATCHES * RUN.accumulate
    gathers = {2: 1 + 1, 3: 2 * micro_batches + RUN.accumulate}[zero_stage]
    assert [count[SCATTER] for count in counts] == [2 * micro_batches] * 4
    assert [count[GATHER] for count in counts] == [gathers] * 4


def test_shards_in_16_bits_are_added_up_in_fp32() -> None:
    """A sum in bf16 would stay at 256, where it has steps of 2."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    place = ReducedGradient(SimpleNamespace(sharded_param=parameter))
    for _ in range(512):
        parameter.grad = torch.ones_like(parameter)
        place.add_up()
    total = place.grad
    assert total is not None and total.dtype == torch.float32 and total.tolist() == [512.0] * 3
    place.grad = total
    assert parameter.grad is place.grad and parameter.grad.dtype == torch.bfloat16


def _train_with_own_factor(factors: tuple[float, float]) -> str | dict[str, Tensor]:
    """Multiply the loss by a number of each pipeline, and return the gradients, or the error."""

    def loss(module: LanguageModel, batch: dict[str, Tensor]) -> Tensor:
        return module.model(**batch).loss * factors[dist.get_rank() % 2]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "loss", loss)
        try:
            found = train(run_of(clip=0.0), {"pipeline_parallel_size": 2, "zero_stage": 2}).gradients
            return {name: gradient.cpu() for name, gradient in found.items()}
        except ValueError as error:
            return str(error)


@pytest.mark.slow
def test_losses_that_pipelines_multiply_by_other_numbers_are_refused() -> None:
    """Gradients have been summed over the pipelines before these numbers are known."""
    errors = run_in_processes(4, _train_with_own_factor, (1.0, 2.0))
    assert all("multiplies the model's loss by 1 to 2 in other processes" in e and "\n" not in e for e in errors)


@pytest.mark.slow
def test_losses_that_all_pipelines_multiply_by_one_number_train() -> None:
    twice, once = (run_in_processes(4, _train_with_own_factor, (f, f)) for f in (2.0, 1.0))
    for more, less in zip(twice, once, strict=True):
        for name, gradient in less.items():
            torch.testing.assert_close(more[name], 2 * gradient)


def _check_counts(zero_stage: int, training: bool) -> str:
    try:
        agreement = BatchAgreement(dist.group.WORLD, zero_stage, ParallelSizes(data=2), DEVICE)
        agreement.check_micro_batches(3 + dist.get_rank(), training)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("zero_stage", "training", "refused"), [(2, True, True), (3, False, True), (2, False, False), (1, True, False)]
)
def test_other_numbers_of_micro_batches_are_refused_where_each_waits(
    zero_stage: int, training: bool, refused: bool
) -> None:
    for error in run_in_processes(2, functools.partial(_check_counts, zero_stage, training)):
        assert ("processes have 3 to 4 micro-batches in a batch" in error) == refused and "\n" not in error
