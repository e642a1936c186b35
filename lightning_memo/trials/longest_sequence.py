"""A search from its settings to its answer, for the strategy and the command line."""

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
from lightning_memo.profiler.machine import available_host_bytes
from lightning_memo.profiler.measured_costs import model_fingerprint
from lightning_memo.trials.attempts import attempts_table, load_attempts, save_search
from lightning_memo.trials.length_search import Attempt, LengthSearch
from lightning_memo.trials.trial import OWN_TRAINER, BatchOf, Trial, random_tokens
from lightning_memo.trials.trial_process import TrialProcess

_USABLE_SHARE = 0.9


def find_longest(
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
    """Searches the longest length that trains, tells of each attempt, and prints all of them.

    Args:
        config: Settings of the strategy.
        module: What is trained.
        batch_of: Makes a batch of a number of tokens; `None`: random tokens.
        search: The least and the longest length of interest, and what lengths are multiples of.
        trainer: Arguments of Lightning's trainer.
        steps_per_trial: Optimizer steps of an attempt.
        results: Where all attempts are written, after each.
        resume: Whether to go on from there.

    Raises:
        ValueError: A setting is wrong, or nothing fits.
        RuntimeError: An attempt failed for another reason than memory.
    """
    _check(config, trainer, steps_per_trial)
    batch_of = random_tokens(module) if batch_of is None else batch_of
    described = _describe(config, module, batch_of, trainer) | {"steps_per_trial": steps_per_trial}
    earlier = load_attempts(results, described) if resume and results is not None else []
    found = LengthSearch(*search, earlier)
    trial = Trial(
        module=module,
        batch_of=batch_of,
        settings={**asdict(config), "plan": None, "plan_memory": False},
        trainer=trainer,
        steps=steps_per_trial,
    )
    with TrialProcess(trial, _memory_bytes(trainer)) as attempt:
        _run(found, attempt, lambda: None if results is None else save_search(results, found, described))
    return _answer(found)


def _run(search: LengthSearch, attempt: Callable[[int], Attempt], save: Callable[[], None]) -> None:
    console = Console()
    save()  # if that is not possible, it is told now, not after the first attempt
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
            f"not even low={search.low} tokens train ({search.attempts[-1].reason}): give a smaller low, slice_tokens, "
            "or more memory"
        )
    return longest


def _check(config: MemoConfig, trainer: Mapping[str, Any], steps_per_trial: int) -> None:
    if type(steps_per_trial) is not int or steps_per_trial < 2:
        raise ValueError(f"steps_per_trial={steps_per_trial!r}: give 2 or more, as the first step is only profiled")
    if unknown := sorted(set(trainer) - set(inspect.signature(Trainer).parameters)):
        raise ValueError(f"{', '.join(unknown)}: no argument of the search or of Lightning's Trainer; correct the name")
    sizes = [config.context_parallel_size, config.tensor_parallel_size]
    sizes += [trainer.get("devices", 1), trainer.get("num_nodes", 1), int(os.environ.get("WORLD_SIZE", 1))]
    if any(size != 1 for size in sizes):
        raise ValueError(
            "the longest length is searched in one process: set devices, num_nodes and the parallel sizes to 1"
        )


def _describe(
    config: MemoConfig, module: LightningModule, batch_of: BatchOf, trainer: Mapping[str, Any]
) -> dict[str, Any]:
    """What attempts depend on: a search can't go on with those of another one."""
    return {
        "module": f"{model_fingerprint(module)} {dict(module.hparams)}",
        "batch_of": getattr(batch_of, "__qualname__", repr(batch_of)),
        "strategy": repr(config),
        "trainer": repr(sorted((name, repr(value)) for name, value in trainer.items() if name not in OWN_TRAINER)),
        "torch": torch.__version__,
    }


def _memory_bytes(trainer: Mapping[str, Any]) -> int | None:
    """What an attempt on a CPU may take of the host, where Linux can be told; on a GPU its own memory ends first."""
    on_gpu = torch.cuda.is_available() and trainer.get("accelerator", "auto") != "cpu"
    return None if on_gpu or sys.platform != "linux" else int(_USABLE_SHARE * available_host_bytes())
