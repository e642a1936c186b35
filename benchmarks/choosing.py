"""Generates the tables of docs/choosing.md from estimates, each with the command that computes it.

    python benchmarks/choosing.py
    python benchmarks/choosing.py --check   exits with status 1 if the page is out of date

The tables are computed without measuring, so any machine can generate them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from pages.generated_section import write_or_check
from pages.markdown import table

from lightning_memo.cli.hydra_command import config_dir
from lightning_memo.estimate.command import CommandSettings, answer, read_settings
from lightning_memo.estimate.parallelism_search import search
from lightning_memo.estimate.request import Estimate
from lightning_memo.estimate.tables import format_alpha
from lightning_memo.utils.units import format_bytes

PAGE: Final = Path(__file__).parents[1] / "docs" / "choosing.md"
_METHODS: Final = {
    "plain": "plain", "full_recompute": "full recomputation", "full_swap": "full swapping", "memo": "Memo"
}  # fmt: skip
_DOES_NOT_FIT: Final = {"oom": "device full", "oohm": "host full"}


@dataclass(frozen=True)
class Sweep:
    """A sweep over one setting and all methods."""

    title: str
    setting: str
    values: Sequence[str]
    others: Sequence[str]

    @property
    def command(self) -> str:
        swept = (f"{self.setting}={','.join(self.values)}", f"method={','.join(_METHODS)}")
        return " ".join(("python -m lightning_memo.estimate -m", *self.others, *swept))


_LENGTHS: Final = (
    Sweep(
        "1B on one H100", "seq_len", ("16K", "64K", "128K", "256K", "512K"),
        ("model=llama3_2_1b", "cluster=h100", "gpus=1", "batch_size=1"),
    ),
    Sweep(
        "8B on eight H100", "seq_len", ("16K", "64K", "256K", "512K", "1M"),
        ("model=llama3_8b", "cluster=h100", "gpus=8", "batch_size=8"),
    ),
)  # fmt: skip
_LONGEST: Final = (
    Sweep("8B on H100", "gpus", ("1", "8", "32"), ("model=llama3_8b", "cluster=h100", "batch_size=8", "seq_len=max")),
)

_ONE_H100: Final = ("cluster=h100", "gpus=1", "batch_size=1", "seq_len=1M", "precision=bf16-true")
_TRAINED: Final = {
    "1B": ("model=llama3_2_1b",), "8B, LoRA": ("model=llama3_8b", "model.lora.r=16"), "8B": ("model=llama3_8b",)
}  # fmt: skip
_SLICES: Final = {
    "no slices": (),
    "`stream_from_host=attention`": ("slice_tokens=32K", "stream_from_host=attention"),
    "`stream_from_host=hidden`": ("slice_tokens=32K", "stream_from_host=hidden"),
    "`stream_from_host=model`": ("slice_tokens=32K", "stream_from_host=model"),
}


def main() -> int:
    """Writes the section of the page, or compares it."""
    return write_or_check("choosing", __doc__, PAGE, section)


def section() -> str:
    """Returns all tables."""
    return "\n\n".join([*map(by_length, _LENGTHS), *map(longest, _LONGEST), sliced()])


def by_length(sweep: Sweep) -> str:
    """Returns the table of MFU by length and method."""
    head = [sweep.title, *_METHODS.values(), "alpha", "TP / CP / DP, ZeRO"]
    rows = []
    for value, answers in _answers(sweep):
        speeds = [f"{a.mfu:.1f} %" if a.mfu is not None else _DOES_NOT_FIT[a.status] for a in answers.values()]
        rows.append([value, *speeds, *_choices(answers["memo"])])
    return f"**MFU by length: {sweep.title}**\n\n```bash\n{sweep.command}\n```\n\n{table(head, rows)}"


def longest(sweep: Sweep) -> str:
    """Returns the table of the longest sequence by method."""
    rows = [
        [value, *(f"{a.seq_len:,}" if a.status == "ok" else "none" for a in answers.values())]
        for value, answers in _answers(sweep)
    ]
    made = table(["GPUs", *_METHODS.values()], rows)
    return f"**Tokens of the longest sequence: {sweep.title}**\n\n```bash\n{sweep.command}\n```\n\n{made}"


def sliced() -> str:
    """Returns the table of a million tokens on one GPU, by model and slice settings."""
    rows = [
        [name, *(_taken(_searched([*model, *_ONE_H100, *slices])) for slices in _SLICES.values())]
        for name, model in _TRAINED.items()
    ]
    command = " ".join(
        ("python -m lightning_memo.estimate", *_TRAINED["1B"], *_ONE_H100, *_SLICES["`stream_from_host=hidden`"])
    )
    made = table(["", *_SLICES], rows)
    title = "**Seconds of a step, and memory of the device: 1M tokens on one H100, slices of 32K**"
    return f"{title}\n\n```bash\n{command}\n```\n\n{made}"


def _taken(answer: Estimate) -> str:
    if answer.step_seconds is None:
        return _DOES_NOT_FIT[answer.status]
    return f"{answer.step_seconds:,.0f} s, {format_bytes(answer.device_bytes['total'])}"


def _choices(memo: Estimate) -> tuple[str, str]:
    """Returns alpha and the parallel sizes of the fastest Memo estimate."""
    if memo.status != "ok":
        return "-", "-"
    parallel = memo.parallel
    sizes = f"{parallel.tp} / {parallel.cp} / {parallel.dp}, {parallel.zero_stage}"
    return format_alpha(memo.alpha, memo.device_bytes, memo.storage), sizes


def _answers(sweep: Sweep) -> Iterator[tuple[str, Mapping[str, Estimate]]]:
    found: dict[str, dict[str, Estimate]] = {}
    for value, method in itertools.product(sweep.values, _METHODS):
        found.setdefault(value, {})[method] = _estimate([*sweep.others, f"{sweep.setting}={value}", f"method={method}"])
    yield from found.items()


def _estimate(overrides: list[str]) -> Estimate:
    _, ranking = answer(_command(overrides), progress=False)
    return ranking.best


def _searched(overrides: list[str]) -> Estimate:
    """Returns the estimate without the additional advice of the command."""
    command = _command(overrides)
    return search(command.request, command.forced).best


def _command(overrides: list[str]) -> CommandSettings:
    with initialize_config_dir(config_dir(), version_base="1.3"):
        settings: Any = OmegaConf.to_container(compose("estimate", overrides))
    return read_settings(settings, next(o.partition("=")[2] for o in overrides if o.startswith("model=")))


if __name__ == "__main__":
    sys.exit(main())
