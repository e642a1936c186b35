"""What one process cannot do, none tries: plans are agreed, and errors are everyone's, within the timeout."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from support.devices import DEVICE
from support.markers.slow import slow_if
from support.modes import BY_ALPHA
from support.parallel_training import Outcome, Run, train
from support.processes import Group, ProcessError, run_in_processes
from typing_extensions import override

from lightning_memo.artifacts.plan import Plan
from lightning_memo.planner.token_slices import plan_of_alpha
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
        "test_mode": BY_ALPHA,
        "device_memory": "1400KiB",
    }  # for any alpha, and less than the 1421 KiB of plain training
    generous, scarce = room | {"host_memory": "10MiB"}, room | {"host_memory": "220KiB"}
    by_itself = {
        name: run_in_processes(2, _train_with_fast_copies, [settings, settings])[0][1].swap.alpha
        for name, settings in (("generous", generous), ("scarce", scarce))
    }
    (_, first), (_, second) = run_in_processes(2, _train_with_fast_copies, [generous, scarce])
    assert first.swap.alpha == second.swap.alpha == by_itself["scarce"] < by_itself["generous"]


@pytest.mark.slow
def test_plain_training_only_where_all_have_room() -> None:
    (_, first), (_, second) = run_in_processes(2, _train_with, [{"device_memory": "1GiB"}, MEMO])
    assert not (first.swap.plain or second.swap.plain)
    assert first.swap.alpha == second.swap.alpha


@slow_if(lambda cut: "tensor_parallel_size" in cut)
@pytest.mark.parametrize("cut", [{}, {"context_parallel_size": 2}, {"tensor_parallel_size": 2}], ids=["dp", "cp", "tp"])
def test_a_host_budget_that_is_too_small_ends_all(cut: dict[str, Any]) -> None:
    settings = [MEMO | cut, MEMO | cut | {"host_memory": "4KiB"}]
    started = time.monotonic()
    errors = [error for error, _ in run_in_processes(2, _train_with, settings)]
    assert time.monotonic() - started < 100, "the group's timeout is 120 s"
    for error in errors:
        assert error.startswith("rank 1: alpha=0 swaps") and "raise host_memory" in error and "\n" not in error


@pytest.mark.parametrize("packed", [True, False])
def test_documents_that_would_see_each_other_end_all(packed: bool) -> None:
    run = Run(family="llama_caching", steps=1, packed=packed)
    for error, _ in run_in_processes(2, _train_with, [{"context_parallel_size": 2}] * 2, run):
        if packed:
            assert "LlamaModel makes a key-value cache" in error and "use_cache = False" in error and "\n" not in error
        else:
            assert error == ""


@pytest.mark.slow
def test_different_plans_end_all(tmp_path: Path) -> None:
    plan: Plan = run_in_processes(2, _train_with, [MEMO | {"alpha": 0.5}] * 2)[0][1]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    plan.save(files[0])
    storage = plan_of_alpha(plan.swap.storage.tokens, 0.25, plan.swap.calls)
    replace(plan, swap=replace(plan.swap, storage=storage)).save(files[1])
    same = run_in_processes(2, _train_with, [MEMO | {"plan": str(files[0])}] * 2)
    assert [error for error, _ in same] == ["", ""] and same[0][1].swap.alpha == 0.5
    errors = [error for error, _ in run_in_processes(2, _train_with, [MEMO | {"plan": str(f)} for f in files])]
    for error in errors:
        assert "different plans (rank 0: alpha=0.5, rank 1: alpha=0.25)" in error


@pytest.mark.slow
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


class IsKilled(Callback):
    """A process is killed in the third step, while a layer runs forward, or computes its activations again.

    Args:
        rank: Rank of the process.
        call: Number of the call of its last layer in the step.
    """

    def __init__(self, rank: int, call: int) -> None:
        self.notes: dict[str, Any] = {}
        self._is_this, self._calls_before = dist.get_rank() == rank, call

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self._is_this and trainer.global_step == 2:
            own = [layer for layer in module.model.model.layers if any(True for _ in layer.parameters())]
            own[-1].mlp.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        if self._calls_before == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._calls_before -= 1


def _train_until_a_death(run: Run, settings: dict[str, Any], dies: Callable[[], Callback]) -> tuple[str, list[str]]:
    """The error that this process ends with, and what was logged."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear()
    logging.getLogger("lightning_memo").addHandler(ear)
    try:
        train(run, settings, watch=dies)
    except RuntimeError as error:
        return str(error), heard
    return "", heard


class Report(Exception):
    """Carries what a process has to say out of one that goes on."""


def _report_a_death(settings: dict[str, Any]) -> Outcome:
    error, heard = _train_until_a_death(RUN, settings, Dies)
    raise Report(f"error: {error} heard: {heard}")


@pytest.mark.slow
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


def _end_after_a_death(settings: dict[str, Any], dies: Callable[[], Callback], told: str) -> None:
    """Say in a file what was logged after another process has died, and end, as the command does."""
    timeout = timedelta(seconds=20)
    _, heard = _train_until_a_death(Run(batch=4, layers=4), settings | {"alpha": 0.0, "timeout": timeout}, dies)
    Path(f"{told}-{dist.get_rank()}").write_text("\n".join(line for line in heard if "rank" in line))
    os._exit(1)


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "killed", "call"), [(4, 3, 1), (3, 0, 0), (3, 1, 3)])
def test_all_others_notice_that_a_stage_of_a_pipeline_is_killed(
    processes: int, killed: int, call: int, tmp_path: Path
) -> None:
    """There are two pipelines of two stages, or one of three."""
    stages = {4: {"pipeline_parallel_size": 2}, 3: {"pipeline_parallel_size": 3, "pipeline_layers": [2, 1, 1]}}
    group = Group(processes, timeout_seconds=20)
    try:
        with pytest.raises(ProcessError) as caught:
            group.run(_end_after_a_death, stages[processes], partial(IsKilled, killed, call), str(tmp_path / "told"))
    finally:
        group.stop()
    assert caught.value.errors[killed].startswith("the process ended with exit code -9")
    told = {rank: tmp_path / f"told-{rank}" for rank in range(processes) if rank != killed}
    for rank, file in told.items():
        (line,) = file.read_text().splitlines()
        assert line.startswith(f"rank {rank} lost another process of the run")


def _limits(family: str, settings: dict[str, Any]) -> tuple[timedelta, set[timedelta]]:
    """Return how long the backend of the first group waits, and those of all others that have this process."""
    train(Run(family=family, steps=1, layers=2, batch=4), settings | {"timeout": timedelta(seconds=77)})
    limits = {group: group._get_backend(DEVICE).options._timeout for group in dist.distributed_c10d._world.pg_map}
    return limits.pop(dist.group.WORLD), set(limits.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (
            "mixtral_balanced",
            {"context_parallel_size": 2, "ulysses_size": 2, "expert_parallel_size": 4},
        ),
        ("llama_gqa", {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    ],
    ids=["dp2 x cp2 ep4", "pp2 x tp2"],
)
def test_all_groups_wait_as_long_as_the_strategy_says(family: str, settings: dict[str, Any]) -> None:
    group = Group(4, timeout_seconds=120)
    try:
        assert group.run(_limits, family, settings) == [(timedelta(seconds=120), {timedelta(seconds=77)})] * 4
    finally:
        group.stop()
