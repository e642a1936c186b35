"""Searches the longest sequence that trains: checks the settings, tries lengths, and saves and reports each attempt.

The state of the search is the list of attempts, so that it can resume at any time.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_memo.config import MemoConfig
from lightning_memo.profiler.measured_costs import model_fingerprint
from lightning_memo.trials.training_trial import (
    OVERRIDDEN_TRAINER_ARGUMENTS,
    Attempt,
    BatchOf,
    StrategyFactory,
    Trial,
    TrialProcess,
    random_tokens,
)
from lightning_memo.utils.files import replacing
from lightning_memo.utils.free_memory import available_host_bytes
from lightning_memo.utils.units import format_bytes, read_length

_USABLE_FRACTION = 0.9


def find_longest(
    strategy_factory: StrategyFactory,
    config: MemoConfig,
    module: LightningModule,
    batch_of: BatchOf | None,
    search: tuple[int | str, int | str, int | str],
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
    earlier = _load_attempts(results, described) if resume and results is not None else []
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
        _run(found, attempt, lambda: None if results is None else _save_search(results, found, described))
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
    console.print(_attempts_table(search.attempts))


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


def _save_search(path: Path, search: LengthSearch, settings: dict[str, Any]) -> None:
    """Writes the attempts of a search and the settings that they were made with.

    Raises:
        OSError: The file cannot be written.
    """
    longest = search.longest
    content = {
        "longest": None if longest is None else longest.tokens,
        "finished": search.next_tokens() is None,
        "low": search.low,
        "high": search.high,
        "multiple_of": search.multiple_of,
        "settings": settings,
        "attempts": [asdict(attempt) for attempt in search.attempts],
    }
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _load_attempts(path: Path, settings: dict[str, Any]) -> list[Attempt]:
    """Returns the attempts of an earlier search with the same settings, or none if the file does not exist.

    Raises:
        ValueError: The file was written with other settings, or not by `_save_search`.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        attempts = [Attempt(**attempt) for attempt in content["attempts"]]
        earlier = content["settings"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: not a file of an earlier search ({error}): give another file, or resume=False"
        ) from None
    if differing := sorted(name for name in settings | earlier if settings.get(name) != earlier.get(name)):
        raise ValueError(
            f"{path}: the earlier search used another {', '.join(differing)}: start a new search with resume=False"
        )
    return attempts


def _attempts_table(attempts: Sequence[Attempt]) -> Table:
    """Returns a table with one row for each length that was tried, the shortest first."""
    table = Table(title="Lengths", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), caption_justify="left")
    for name in ("tokens", "planned", "device peak", "host", "step"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for attempt in sorted(attempts, key=lambda attempt: attempt.tokens):
        sizes = (attempt.planned_device_bytes, attempt.peak_device_bytes, attempt.host_bytes)
        seconds = "-" if attempt.step_seconds is None else f"{attempt.step_seconds:.2f} s"
        cells = ["-" if size is None else format_bytes(size) for size in sizes]
        table.add_row(f"{attempt.tokens:,}", *cells, seconds, Text("fits" if attempt.fits else attempt.reason))
    return table


class LengthSearch:
    """Searches for the longest length that fits, assuming that longer sequences need more memory.

    The first two attempts, at short lengths, show how memory grows. The next attempt is at the length predicted to fill
    the memory. Later predictions use the two longest lengths that fit. Every other attempt bisects the remaining range,
    or doubles the length, so that wrong predictions cost at most twice the attempts of bisection.

    Args:
        low: Shortest length of interest, in tokens.
        high: Longest length of interest, in tokens.
        multiple_of: Only multiples of this number are tried.
        attempts: Earlier attempts with the same settings. Those at other lengths than the ones searched are ignored.

    Raises:
        ValueError: No multiple lies between `low` and `high`, or a length is none.
    """

    def __init__(
        self, low: int | str, high: int | str, multiple_of: int | str, attempts: Iterable[Attempt] = ()
    ) -> None:
        low, high = read_length("low", low), read_length("high", high)
        multiple_of = read_length("multiple_of", multiple_of)
        if high < low:
            raise ValueError(f"high={high} is below low={low}: give the shortest length of interest as low")
        self.low, self.high = -(-low // multiple_of) * multiple_of, high // multiple_of * multiple_of
        if self.high < self.low:
            raise ValueError(
                f"no multiple of {multiple_of} lies between low={low} and high={high}: give a smaller multiple_of"
            )
        self.multiple_of = multiple_of
        lengths = range(self.low, self.high + 1, multiple_of)
        self.attempts = [attempt for attempt in attempts if attempt.tokens in lengths]

    @property
    def longest(self) -> Attempt | None:
        """The attempt at the longest length that has fit so far, or None."""
        return max((a for a in self.attempts if a.fits), key=lambda attempt: attempt.tokens, default=None)

    def add(self, attempt: Attempt) -> None:
        """Adds the result of an attempt."""
        self.attempts.append(attempt)

    def next_tokens(self) -> int | None:
        """Returns the length to try next, or None when the search is finished."""
        longest = self.longest
        if longest is None:
            return None if any(attempt.tokens == self.low for attempt in self.attempts) else self.low
        least = longest.tokens + self.multiple_of
        failed = min((a.tokens for a in self.attempts if not a.fits), default=self.high + self.multiple_of)
        most = failed - self.multiple_of
        if least > most:
            return None
        return min(max(self._proposed(longest.tokens, failed), least), most)

    def _proposed(self, longest: int, failed: int) -> int:
        count = len(self.attempts)
        if count == 2 or count % 2 == 1 < count:
            return self._predicted()
        return self._down((longest + failed) // 2 if failed <= self.high else 2 * longest)

    def _predicted(self) -> int:
        """The length at which planned memory would reach its limit if it grew linearly."""
        fitting = sorted((a for a in self.attempts if a.fits), key=lambda attempt: attempt.tokens)
        shorter, longer = fitting[max(len(fitting) - 2, 0)], fitting[-1]
        lengths = []
        for needs, limit in (
            ((shorter.planned_device_bytes, longer.planned_device_bytes), longer.device_limit_bytes),
            ((shorter.host_bytes, longer.host_bytes), longer.host_limit_bytes),
        ):
            lengths.append(_length_at((shorter.tokens, longer.tokens), needs, limit))
        return self._down(min([length for length in lengths if length is not None], default=self.high))

    def _down(self, tokens: int) -> int:
        return tokens // self.multiple_of * self.multiple_of


def _length_at(tokens: Sequence[int], needs: Sequence[int | None], limit: int | None) -> int | None:
    """The length at which a line through two points reaches a limit, or None if it never does or a value is unknown."""
    first, second = needs
    if first is None or second is None or limit is None or second <= first:
        return None
    return tokens[1] + (limit - second) * (tokens[1] - tokens[0]) // (second - first)
