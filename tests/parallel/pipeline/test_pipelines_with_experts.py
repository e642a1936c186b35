"""Pipelines whose stages divide the experts of their layers give what training in one process gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.architectures.mixtures import MIXTURES
from support.devices import DEVICE, skip_ring_on_cuda
from support.modes import JOINT
from support.parallel_training import Run, train, train_alone, train_together
from support.processes import run_in_processes
from support.samples.configurations import BOUND

from lightning_memo.engine import TestMode
from lightning_memo.parallel.parallel_sizes import ParallelSizes
from lightning_memo.parallel.pipeline.pipeline_messages import BatchAgreement

PARTS = ("loss", "norm", "gradients", "weights")
BOTH = {"pipeline_parallel_size": 2, "expert_parallel_size": 2}
TENSOR = {"tensor_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2, "ulysses_size": 2}


def run_of(family: str = "mixtral", **other: Any) -> Run:
    sizes = {"tokens": 45, "batch": 4, "layers": 4, "steps": 3, "clip": 0.5}
    return Run(**{"family": MIXTURES.get(family, family)} | sizes | other)


def check(run: Run, settings: dict[str, Any], processes: int = 4) -> None:
    skip_ring_on_cuda(settings)
    errors = train_together(processes, run, BOTH | settings).worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in PARTS), errors


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_equals_one_process(alpha: float, blocks: int, zero_stage: int) -> None:
    check(run_of(accumulate=2), {"alpha": alpha, "virtual_pipeline_size": blocks, "zero_stage": zero_stage})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "processes"),
    [
        ("mixtral", CONTEXT, 4),
        ("mixtral", {"context_parallel_size": 2}, 4),
        ("deepseek_v3", {}, 4),
        ("lopsided", {"virtual_pipeline_size": 2, "zero_stage": 1}, 4),
        ("qwen3_moe", {"test_mode": TestMode(5, 0.0005)}, 4),
        ("mixtral", TENSOR, 8),
        ("mixtral", {"zero_stage": 1}, 8),
    ],
    ids=str,
)
def test_kinds_of_models_and_other_sizes(family: str, settings: dict[str, Any], processes: int) -> None:
    check(run_of(family), {"alpha": 0.5} | settings, processes)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("settings", [{"alpha": 0.5}, {"alpha": 0.5, "test_mode": JOINT}, {"zero_stage": 3}], ids=str)
def test_padding_in_some_micro_batches(rows: int, settings: dict[str, Any]) -> None:
    """Processes that share experts have padding in other micro-batches."""
    check(run_of(padded=True, batch=4 * rows), settings | {"micro_batch_size": rows})


def _error_of(family: str) -> str:
    try:
        train(run_of(family), BOTH | {"alpha": 0.5})
    except ValueError as error:
        return str(error)
    return ""


def test_balancing_losses_are_refused_in_one_line() -> None:
    for error in run_in_processes(4, _error_of, "mixtral_balanced"):
        assert "MixtralForCausalLM got output_router_logits" in error and "\n" not in error


def _agreements() -> list[str]:
    """Let two processes with other numbers compare them, as pipelines that share experts, and as the same pipeline."""
    errors = []
    for sizes in (ParallelSizes(data=2, expert=2), ParallelSizes(context=2, expert=2)):
        agreement = BatchAgreement(dist.group.WORLD, 0, sizes, DEVICE)
        for compare in (
            lambda agreement=agreement: agreement.check_micro_batches(3 + dist.get_rank(), training=False),
            lambda agreement=agreement: agreement.check_factor(torch.tensor(1.0 + dist.get_rank())),
        ):
            try:
                compare()
                errors.append("")
            except ValueError as error:
                errors.append(str(error))
    return errors


def test_pipelines_that_share_experts_agree_on_each_batch() -> None:
    for errors in run_in_processes(2, _agreements):
        counts, factor, *alone = errors
        assert (
            "with expert_parallel_size=2 each waits for the others" in counts and "set expert_parallel_size=1" in counts
        )
        assert "multiplies the model's loss by 1 to 2 in other processes, and with expert_parallel_size=2" in factor
        assert alone == ["", factor]
