"""Command line ``python -m lightning_memo.estimate [overrides]``: one estimate, or a sweep of them with ``-m``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from lightning_memo.cli.hydra_command import (
    command_error_message,
    config_dir,
    exit_for_user,
    plain_settings,
    run_command,
)
from lightning_memo.estimate.estimate_tables import print_answer
from lightning_memo.estimate.parallelism_search import Ranking, Report, longest, longest_with, search
from lightning_memo.estimate.request.command_settings import CommandRequest, read_settings
from lightning_memo.estimate.request.estimate_request import Question
from lightning_memo.estimate.step.planner_inputs import device_budget
from lightning_memo.estimate.sweep.job_estimates import JobEstimate
from lightning_memo.estimate.what_would_fit import changes_that_fit


def answer(request: CommandRequest, progress: bool = True, changes: bool = True) -> tuple[Question, Ranking]:
    """Finds the best parallelism, and the longest sequence if the request asks for it.

    Args:
        request: Settings of the command.
        progress: Whether to show a progress bar on stderr.
        changes: Whether to search for changes that fit if the training does not, which takes seconds.

    Returns:
        The question with its sequence length, and the ranking. The limits of the best estimate also state the longest
        sequence that fits with its parallelism.

    Raises:
        ValueError: No parallelism is possible.
    """
    question = request.question
    if request.longest:
        with _progress("longest sequence", progress) as report:
            tokens = longest(question, request.forced, request.multiple_of, report)
        # If nothing fits, the answer is the reason for the shortest length that all sizes divide.
        question = replace(question, seq_len=tokens or request.multiple_of * question.gpus)
    with _progress("parallelism", progress) as report:
        ranking = search(question, request.forced, report)
    fitting = longest_with(question, ranking.best.parallel, request.multiple_of)
    longest_fit = "No sequence length fits" if fitting is None else f"Sequences of up to {fitting:,} tokens fit"
    missing = changes and ranking.best.status != "ok"
    helpful = changes_that_fit(question, request.forced) if missing else []
    limits = [*ranking.best.limits, f"{longest_fit} with this parallelism.", *helpful]
    best = replace(ranking.best, limits=limits)
    return question, replace(ranking, best=best)


@contextmanager
def _progress(what: str, progress: bool) -> Iterator[Report]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    hidden = not (progress and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def run_estimate_job(cfg: DictConfig) -> JobEstimate:
    """Runs one job. A single job prints its estimate; a job of a sweep writes a file, which may hold an error."""
    job = HydraConfig.get()
    sweep = job.mode is RunMode.MULTIRUN
    try:
        request = read_settings(plain_settings(cfg), str(job.runtime.choices.get("model")))
        question, ranking = answer(request, changes=not sweep)
    except Exception as error:
        message = command_error_message(error)
        if not sweep or message is None:
            exit_for_user(error)  # before Hydra prints a message about a failed job
            raise
        failed = JobEstimate(overrides=list(job.overrides.task), longest=False, message=message)
        failed.save(Path(job.runtime.output_dir))
        return failed
    done = JobEstimate(
        overrides=list(job.overrides.task),
        longest=request.longest,
        answer=ranking.best.to_dict(),
        device_budget_bytes=device_budget(question, ranking.best.parallel).device_bytes,
    )
    if sweep:
        done.save(Path(job.runtime.output_dir))
    if request.output == "json":
        print(json.dumps(done.answer))  # noqa: T201
    elif not sweep:
        print_answer(question, ranking, request.alternatives)
    return done


def main() -> None:
    """Prints one estimate or runs a sweep. A sweep with wrong settings ends with status 1 after its report."""
    failed: list[JobEstimate] = []

    def task(cfg: DictConfig) -> None:
        done = run_estimate_job(cfg)
        if done.message:
            failed.append(done)

    run_command(lambda: hydra.main(version_base="1.3", config_path=config_dir(), config_name="estimate")(task)())
    if failed:
        raise SystemExit(1)
