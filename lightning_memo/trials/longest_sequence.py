"""Runs the search for the longest sequence: checks its settings, tries lengths and reports each attempt."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from rich.console import Console

from lightning_memo.config import MemoConfig
from lightning_memo.profiler.measured_costs import model_fingerprint
from lightning_memo.trials.attempt_records import attempts_table, load_attempts, save_search
from lightning_memo.trials.length_search import Attempt, LengthSearch
from lightning_memo.trials.random_tokens import random_tokens
from lightning_memo.trials.training_trial import OVERRIDDEN_TRAINER_ARGUMENTS, BatchOf, StrategyFactory, Trial
from lightning_memo.trials.trial_process import TrialProcess
from lightning_memo.utils.free_host_memory import available_host_bytes

_USABLE_FRACTION = 0.9


def find_longest(
    strategy_factory: StrategyFactory,
    config: MemoConfig,
    module: LightningModule,
    batch_of: BatchOf | None,
    search: tuple[int, int, int],
    trainer: Mapping[str, Any],
    *,
    steps_per_trial: int = 3,
    results: Path | None = None,
    resume: bool = False,
) -> Attempt:
    """Searches for the longest sequence that trains. Prints a line after each attempt and a table at the end.

    Args:
        strategy_factory: Builds the strategy of a trial from settings, for example the class `MemoStrategy`.
        config: Settings of the strategy.
        module: Module to train.
        batch_of: Function that takes a number of tokens and returns a batch, or None for random tokens.
        search: Shortest length, longest length, and the number that lengths are multiples of, all in tokens.
        trainer: Arguments of Lightning's trainer.
        steps_per_trial: Number of optimizer steps of each attempt.
        results: JSON file to which all attempts are written after each attempt.
        resume: Whether to resume from the attempts in `results`.

    Raises:
        ValueError: A setting is wrong, or not even the shortest length fits.
        RuntimeError: An attempt failed for another reason than a lack of memory.
    """
    _check(config, trainer, steps_per_trial)
    batch_of = random_tokens(module) if batch_of is None else batch_of
    described = _describe(config, module, batch_of, trainer) | {"steps_per_trial": steps_per_trial}
    earlier = load_attempts(results, described) if resume and results is not None else []
    found = LengthSearch(*search, earlier)
    trial = Trial(
        strategy_factory=strategy_factory,
        module=module,
        batch_of=batch_of,
        settings={**asdict(config), "plan": None, "plan_memory": False},
        trainer=trainer,
        steps=steps_per_trial,
    )
    with TrialProcess(trial, _memory_bytes(trainer), [strategy_factory.__module__]) as attempt:
        _run(found, attempt, lambda: None if results is None else save_search(results, found, described))
    return _answer(found)


def _run(search: LengthSearch, attempt: Callable[[int], Attempt], save: Callable[[], None]) -> None:
    console = Console()
    save()  # fails now, rather than after the first attempt, if the file cannot be written
    while (tokens := search.next_tokens()) is not None:
        with console.status(f"trying {tokens:,} tokens"):
            made = attempt(tokens)
        search.add(made)
        save()
        console.print(
            f"{tokens:,} tokens: {'fits' if made.fits else made.reason}", highlight=False, markup=False, soft_wrap=True
        )
    console.print(attempts_table(search.attempts))


def _answer(search: LengthSearch) -> Attempt:
    longest = search.longest
    if longest is None:
        raise ValueError(
            f"not even low={search.low} tokens fit ({search.attempts[-1].reason}): give a smaller low, set "
            "slice_tokens, or allow more memory"
        )
    return longest


def _check(config: MemoConfig, trainer: Mapping[str, Any], steps_per_trial: int) -> None:
    if type(steps_per_trial) is not int or steps_per_trial < 2:
        raise ValueError(f"steps_per_trial={steps_per_trial!r}: give 2 or more; the first step is only profiled")
    if unknown := sorted(set(trainer) - set(inspect.signature(Trainer).parameters)):
        raise ValueError(
            f"{', '.join(unknown)}: not an argument of the search or of Lightning's Trainer; correct the name"
        )
    sizes = [config.context_parallel_size, config.tensor_parallel_size, config.expert_parallel_size]
    sizes.append(config.pipeline_parallel_size)
    sizes += [trainer.get("devices", 1), trainer.get("num_nodes", 1), int(os.environ.get("WORLD_SIZE", 1))]
    if any(size != 1 for size in sizes):
        raise ValueError(
            "the longest sequence is searched in one process: set devices, num_nodes and the parallel sizes to 1"
        )


def _describe(
    config: MemoConfig, module: LightningModule, batch_of: BatchOf, trainer: Mapping[str, Any]
) -> dict[str, Any]:
    """Describes what attempts depend on; a search resumes only from attempts with the same description."""
    return {
        "module": f"{model_fingerprint(module)} {dict(module.hparams)}",
        "batch_of": getattr(batch_of, "__qualname__", repr(batch_of)),
        "strategy": repr(config),
        "trainer": repr(
            sorted((name, repr(value)) for name, value in trainer.items() if name not in OVERRIDDEN_TRAINER_ARGUMENTS)
        ),
        "torch": torch.__version__,
    }


def _memory_bytes(trainer: Mapping[str, Any]) -> int | None:
    """Limit on host memory for trials on a CPU; None on a GPU, whose own memory runs out first, and outside Linux."""
    on_gpu = torch.cuda.is_available() and trainer.get("accelerator", "auto") != "cpu"
    return None if on_gpu or sys.platform != "linux" else int(_USABLE_FRACTION * available_host_bytes())
