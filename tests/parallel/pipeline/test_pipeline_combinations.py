"""Pipelines beside data, tensor and context parallelism give what training in one process gives.

As in `test_pipeline_training.py`, losses, gradient norms, whole gradients and the last weights are compared with one
process of plain PyTorch, and gradients are clipped.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from support.devices import DEVICE, skip_ring_on_cuda
from support.modes import BY_ALPHA, BY_KIND
from support.parallel_training import Run, WatchAlpha, train_alone, train_together
from support.processes import ProcessError, run_in_processes
from support.samples.configurations import BOUND, CONFIGURATIONS
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

from lightning_memo import MemoStrategy
from lightning_memo.engine import TestMode
from lightning_memo.parallel.pipeline.pipeline_messages import StageMessages

PARTS = ("loss", "norm", "gradients", "weights")
STEPS = 3


def run_of(family: str = "llama_tied", **other: Any) -> Run:
    return Run(family=family, tokens=45, batch=4, layers=4, steps=STEPS, clip=0.5, **other)


def check(run: Run, settings: dict[str, Any], watch: Any = None) -> dict[str, list[Any]]:
    skip_ring_on_cuda(settings)
    outcome = train_together(4, run, {"pipeline_parallel_size": 2} | settings, watch=watch)
    errors = outcome.worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in PARTS), errors
    return outcome.notes


class CountReductions(Callback):
    """Counts how often gradients are reduced over the processes with the same weights."""

    def __init__(self) -> None:
        self.notes = {"reductions": 0}
        self._reduce = _fsdp_param_group.foreach_reduce

    def on_train_start(self, *_: Any) -> None:
        _fsdp_param_group.foreach_reduce = self._counted

    def on_train_end(self, *_: Any) -> None:
        _fsdp_param_group.foreach_reduce = self._reduce

    def on_exception(self, *_: Any) -> None:
        self.on_train_end()

    def _counted(self, *args: Any, **kwargs: Any) -> Any:
        self.notes["reductions"] += 1
        return self._reduce(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_data_parallelism_reduces_gradients_once_for_each_step(alpha: float, accumulate: int, zero_stage: int) -> None:
    settings = {"zero_stage": zero_stage, "alpha": alpha}
    notes = check(run_of(accumulate=accumulate), settings, CountReductions)
    assert notes["reductions"] == [STEPS * 3] * 4  # two layers, and the embedding or the head


@pytest.mark.slow
@pytest.mark.parametrize(("alpha", "accumulate"), [(0.0, 1), (0.5, 1), (1.0, 4)])
@pytest.mark.parametrize("divided", ["tp2", "tp2+sp", "cp2 ring", "cp2 ulysses"])
def test_tensor_and_context_parallelism(divided: str, alpha: float, accumulate: int) -> None:
    """Rows have other lengths each, so that micro-batches have other ones, too."""
    check(run_of(padded=True, accumulate=accumulate), CONFIGURATIONS[divided][1] | {"alpha": alpha})


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_lora", "gemma3_mixed_windows"])
@pytest.mark.parametrize(
    "settings", [{"zero_stage": 1}, {"tensor_parallel_size": 2}, {"context_parallel_size": 2}], ids=str
)
def test_kinds_of_models(family: str, settings: dict[str, Any]) -> None:
    check(run_of(family), settings | {"alpha": 0.5})


@pytest.mark.slow
def test_rows_of_several_documents() -> None:
    check(run_of(packed=True), CONFIGURATIONS["cp2 ulysses"][1] | {"alpha": 0.5})
    with pytest.raises(ProcessError, match="rows with several documents are divided over a ring by the documents"):
        check(run_of(packed=True), CONFIGURATIONS["cp2 ring"][1] | {"alpha": 0.5})


@pytest.mark.slow
@pytest.mark.parametrize("divided", ["tp2+sp", "cp2 ring"])
def test_longer_batches_delays_and_poison(divided: str) -> None:
    settings = {"alpha": 0.5, "test_mode": TestMode(5, 0.0005), "micro_batch_size": 2}
    check(run_of(lengths=(48, 24, 60)), CONFIGURATIONS[divided][1] | settings)


def _order_error() -> str:
    """Send and receive hidden states of batches that two stages lay out by other slices."""
    hidden, onward = torch.ones(1, 16, 4, device=DEVICE), dist.new_group()
    messages = StageMessages((onward, dist.new_group()), DEVICE)
    messages.begin((8, 16) if messages.stage == 0 else (16,))
    try:
        if messages.stage == 0:
            messages.send_hidden(hidden, 0)
            messages.settle()
        else:
            messages.receive_hidden()
    except RuntimeError as error:
        dist.recv(hidden, group=onward, group_src=0)  # for which the first stage waits
        return str(error)
    return ""


def test_tokens_in_another_order_are_refused_in_one_line() -> None:
    first, last = run_in_processes(2, _order_error)
    assert not first and "a stage cuts the batch into other slices" in last and "\n" not in last


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divided", "device_memory"),
    [("cp2 ring", "1000KiB"), ("cp2 ulysses", "1000KiB"), ("tp2", "640KiB"), ("tp2+sp", "560KiB")],
)
def test_stages_name_places_for_kinds_of_tensors_by_themselves(divided: str, device_memory: str) -> None:
    budget = {"test_mode": BY_KIND, "device_memory": device_memory, "host_memory": "800KiB"}
    run = Run(family="llama_tied", tokens=45, batch=6, layers=8, steps=STEPS, clip=0.5)
    plans = check(run, CONFIGURATIONS[divided][1] | budget, WatchAlpha)["storage"]
    assert plans[0] == plans[1] and plans[2] == plans[3]
    assert plans[0].calls != plans[2].calls and (len(plans[0].call_classes), len(plans[2].call_classes)) == (8, 4)
    bounds = [{bound for call in plan.calls for bound in call.bounds} for plan in plans]
    if divided == "tp2+sp":  # tokens are laid out by slices
        assert bounds[0] == bounds[2] and len(bounds[0]) > 2


@pytest.mark.parametrize("setting", [{"offload_state": True}, {"slice_tokens": 8}, {"disk_path": "x"}], ids=str)
def test_what_does_not_run_beside_a_pipeline_is_refused_in_one_line(setting: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not supported with pipeline_parallel_size=2: set") as caught:
        MemoStrategy(pipeline_parallel_size=2, **setting)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_pipelines_beside_each_other_make_later_plans_by_themselves() -> None:
    """The rows of the second pipeline grow, and it profiles again while the first one runs by its plan."""
    check(run_of(growing=True), {"alpha": 0.5, "zero_stage": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("divided", "device_memory", "alike"),
    [("tp2+sp", "400KiB", True), ("tp2", "400KiB", False), ("cp2 ring", "540KiB", False)],
)
def test_stages_agree_on_alpha_only_if_tokens_are_laid_out_by_slices(
    divided: str, device_memory: str, alike: bool
) -> None:
    budget = {"device_memory": device_memory, "host_memory": "800KiB"}
    settings = CONFIGURATIONS[divided][1] | budget | {"test_mode": BY_ALPHA}
    alphas = check(run_of("llama_gqa"), settings, WatchAlpha)["alpha"]
    assert len(set(alphas)) == (1 if alike else 2) and 0 < alphas[0] < 1
