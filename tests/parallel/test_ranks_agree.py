"""What one process cannot do, none tries: plans are agreed, and errors are everyone's, within the timeout."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from support.markers.slow import slow_if
from support.parallel_training import Outcome, Run, train
from support.processes import Group, ProcessError, run_in_processes
from typing_extensions import override

from lightning_memo.artifacts.plan import Plan
from lightning_memo.profiler import measured_costs as costs

RUN = Run(steps=3)
MEMO = {"device_memory": "64KiB"}  # less than plain training needs


def _train_with(settings: list[dict[str, Any]], run: Run = RUN) -> tuple[str, Any]:
    """Train with the settings of this rank; returns the error, or the alpha and mode that were used."""
    try:
        outcome = train(run, settings[dist.get_rank()], _plan_of)
    except ValueError as error:
        return str(error), None
    return "", outcome.notes["plan"]


def _plan_of(trainer: Any) -> dict[str, Any]:
    return {"plan": trainer.strategy.plan}


def _train_with_fast_copies(settings: list[dict[str, Any]]) -> tuple[str, Any]:
    """As `_train_with`, where copies take no time: the host's bytes alone decide, on a busy machine too."""
    with mock.patch.object(costs, "copy_bandwidth", return_value=(1e15, 1e15)):
        return _train_with(settings)


def test_the_smallest_alpha_wins() -> None:
    room = {
        "storage": "alpha",
        "device_memory": "1400KiB",
    }  # for any alpha, and less than the 1421 KiB of plain training
    generous, scarce = room | {"host_memory": "10MiB"}, room | {"host_memory": "220KiB"}
    by_itself = {
        name: run_in_processes(2, _train_with_fast_copies, [settings, settings])[0][1].swap.alpha
        for name, settings in (("generous", generous), ("scarce", scarce))
    }
    (_, first), (_, second) = run_in_processes(2, _train_with_fast_copies, [generous, scarce])
    assert first.swap.alpha == second.swap.alpha == by_itself["scarce"] < by_itself["generous"]


def test_plain_training_only_where_all_have_room() -> None:
    (_, first), (_, second) = run_in_processes(2, _train_with, [{"device_memory": "1GiB"}, MEMO])
    assert first.swap.mode == second.swap.mode == "memo"
    assert first.swap.alpha == second.swap.alpha


@pytest.mark.parametrize("cut", [{}, {"context_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["dp", "cp", "tp"])
def test_a_host_budget_that_is_too_small_ends_all(cut: dict[str, Any]) -> None:
    settings = [MEMO | cut, MEMO | cut | {"host_memory": "4KiB"}]
    started = time.monotonic()
    errors = [error for error, _ in run_in_processes(2, _train_with, settings)]
    assert time.monotonic() - started < 100, "the group's timeout is 120 s"
    for error in errors:
        assert error.startswith("rank 1: alpha=0 swaps") and "raise host_memory" in error and "\n" not in error


def test_a_model_that_mixes_tokens_outside_attention_ends_all() -> None:
    run = Run(family="llama_mixing", steps=1)
    for error, _ in run_in_processes(2, _train_with, [{"context_parallel_size": 2}] * 2, run):
        assert (
            "may not compute each token by itself" in error and "context_parallel_size=1" in error and "\n" not in error
        )


@pytest.mark.parametrize("packed", [True, False])
def test_documents_that_would_see_each_other_end_all(packed: bool) -> None:
    run = Run(family="llama_caching", steps=1, packed=packed)
    for error, _ in run_in_processes(2, _train_with, [{"context_parallel_size": 2}] * 2, run):
        if packed:
            assert "LlamaModel makes a key-value cache" in error and "use_cache = False" in error and "\n" not in error
        else:
            assert error == ""


def test_different_plans_end_all(tmp_path: Path) -> None:
    plan: Plan = run_in_processes(2, _train_with, [MEMO | {"alpha": 0.5}] * 2)[0][1]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    plan.save(files[0])
    replace(plan, swap=replace(plan.swap, alpha=0.25)).save(files[1])
    same = run_in_processes(2, _train_with, [MEMO | {"plan": str(files[0])}] * 2)
    assert [error for error, _ in same] == ["", ""] and same[0][1].swap.alpha == 0.5
    errors = [error for error, _ in run_in_processes(2, _train_with, [MEMO | {"plan": str(f)} for f in files])]
    for error in errors:
        assert "different plans (rank 0: alpha=0.5 memo, rank 1: alpha=0.25 memo)" in error


def test_a_plan_that_one_process_cannot_read_ends_all(tmp_path: Path) -> None:
    plan: Plan = run_in_processes(2, _train_with, [MEMO | {"alpha": 0.5}] * 2)[0][1]
    plan.save(tmp_path / "good.json")
    (tmp_path / "bad.json").write_text("{}")
    settings = [MEMO | {"plan": str(tmp_path / name)} for name in ("good.json", "bad.json")]
    for error, _ in run_in_processes(2, _train_with, settings):
        assert error.startswith("rank 1: ") and "not a plan" in error


class Dies(Callback):
    """Rank 1 is gone in the third step, between forward and backward."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    @override
    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if trainer.global_step == 2 and dist.get_rank() == 1:
            os._exit(1)


def _train_until_a_death(settings: dict[str, Any]) -> tuple[str, list[str]]:
    """The error that this process ends with, and what was logged."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear()
    logging.getLogger("lightning_memo").addHandler(ear)
    try:
        train(RUN, settings, watch=Dies)
    except RuntimeError as error:
        return str(error), heard
    return "", heard


class Report(Exception):
    """Carries what a process has to say out of one that goes on."""


def _report_a_death(settings: dict[str, Any]) -> Outcome:
    error, heard = _train_until_a_death(settings)
    raise Report(f"error: {error} heard: {heard}")


@slow_if(lambda settings: "tensor_parallel_size" in settings)
@pytest.mark.parametrize(
    "settings",
    [{"zero_stage": 3}, {"context_parallel_size": 2}, {"tensor_parallel_size": 2}],
    ids=["zero3", "ring", "tp"],
)
def test_a_process_that_dies_is_noticed_by_the_others(settings: dict[str, Any]) -> None:
    group = Group(2, timeout_seconds=20)
    started = time.monotonic()
    try:
        with pytest.raises(ProcessError) as caught:
            group.run(_report_a_death, {"alpha": 0.5} | settings)
    finally:
        group.stop()
    assert time.monotonic() - started < 100
    assert caught.value.errors[1].startswith("the process ended")
    assert "rank 0 lost another process" in caught.value.errors[0]
    assert "look for the first error in the output of the other ranks" in caught.value.errors[0]
