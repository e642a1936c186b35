"""Losses of training runs that differ in one setting: runs the command, writes the raw file, and draws a picture.

Training is chaotic: rounding alone changes the loss after 200 steps by up to a percent. So each setting is trained with
several seeds, and what is compared is the mean difference between runs of one seed, with its standard error.

Used by `quantised_training.py`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Final

from circumstances import circumstances, save_report
from matplotlib.figure import Figure

from lightning_memo.utils.files import replacing

_BENCHMARKS = Path(__file__).parent
_SEEDS: Final = range(42, 48)
_LAST_STEPS: Final = 50

Run = dict[str, Any]
Runs = dict[str, dict[str, Run]]
"""Training losses of all steps and the validation loss after them, by setting and seed."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs whose losses are compared.

    Attributes:
        name: Name of the raw file and of the picture.
        title: Title of the picture.
        settings: Settings of all runs.
        runs: Further settings of each run, by name. The first one is what the others are compared with.
        controls: Settings that change rounding only, by name. They are trained with the first seed alone.
        processes: Number of processes of a run.
    """

    name: str
    title: str
    settings: Sequence[str]
    runs: Mapping[str, Sequence[str]]
    controls: Mapping[str, Sequence[str]] = field(default_factory=dict)
    processes: int = 1

    @property
    def results(self) -> Path:
        """The raw file."""
        return _BENCHMARKS / "results" / f"{self.name}.json"

    def main(self, description: str | None) -> None:
        """Train, write the raw file and draw it; with `--draw`, only draw."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--draw", action="store_true", help="only draw the picture from the JSON file")
        parser.add_argument("--more", type=int, default=0, help="add runs of so many further seeds to the JSON file")
        options = parser.parse_args()
        if options.more:
            report = json.loads(self.results.read_text(encoding="utf-8"))
            last = max(int(seed) for runs in report["runs"].values() for seed in runs)
            report.setdefault("added", []).append(_circumstances())
            self._train_seeds(report, range(last + 1, last + 1 + options.more))
        elif not options.draw:
            self._run()
        report = json.loads(self.results.read_text(encoding="utf-8"))
        runs: Runs = report["runs"]
        self._draw(runs)
        exact, *others = runs
        losses = [run["validation_loss"] for run in runs[exact].values()]
        print(f"{exact}: validation loss from {min(losses):.2f} to {max(losses):.2f}, by seed")
        for name, run in report["controls"].items():
            print(f"{name}: validation loss {100 * (run['validation_loss'] / losses[0] - 1):+.1f} %")
        for name in others:
            for kind, loss in _LOSSES.items():
                pairs = [(loss(run), loss(runs[exact][seed])) for seed, run in runs[name].items()]
                mean, error = _mean_and_error([100 * (a / b - 1) for a, b in pairs])
                print(f"{name}: {kind} {mean:+.1f} % (± {error:.1f} %)")

    def _run(self) -> None:
        report: dict[str, Any] = {
            **_circumstances(),
            "settings": list(self.settings),
            "controls": {
                name: self._train([*settings, f"seed={_SEEDS[0]}"]) for name, settings in self.controls.items()
            },
            "runs": {name: {} for name in self.runs},
        }
        self._train_seeds(report, _SEEDS)

    def _train_seeds(self, report: dict[str, Any], seeds: Iterable[int]) -> None:
        for seed in seeds:
            for name, settings in self.runs.items():
                report["runs"][name][str(seed)] = self._train([*settings, f"seed={seed}"])
            save_report(self.results, report)  # all runs of the seeds so far

    def _train(self, settings: Sequence[str]) -> Run:
        """The losses of all steps, and the one on the validation text after them."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(self.processes)]
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable, *(launcher if self.processes > 1 else ()), "-m", "lightning_memo.train",
                *self.settings, *settings,
            ]  # fmt: skip
            subprocess.run(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
            (table,) = Path(folder).glob("outputs/demo/runs/*/csv/metrics.csv")
            with table.open(encoding="utf-8") as file:
                rows = list(csv.DictReader(file))
        losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
        return {"losses": losses, "validation_loss": [float(row["val_loss"]) for row in rows if row["val_loss"]][-1]}

    def _draw(self, runs: Runs) -> None:
        figure = Figure(figsize=(8, 3.8), layout="constrained")
        curves, differences = figure.subplots(1, 2)
        for name, style in zip(runs, ("-", "--", ":"), strict=False):
            losses = [fmean(step) for step in zip(*(run["losses"] for run in runs[name].values()), strict=True)]
            curves.plot(range(1, 1 + len(losses)), losses, style, label=name)
        curves.set_ylabel("training loss, nats per token")
        exact, *others = runs
        for name, color in zip(others, ("C1", "C2"), strict=False):
            ratios = [
                [100 * (a / b - 1) for a, b in zip(run["losses"], runs[exact][seed]["losses"], strict=True)]
                for seed, run in runs[name].items()
            ]
            steps = [_mean_and_error(each) for each in zip(*ratios, strict=True)]
            differences.plot(range(1, 1 + len(steps)), [mean for mean, _ in steps], color=color, label=name)
            low, high = ([mean + sign * error for mean, error in steps] for sign in (-1, 1))
            differences.fill_between(range(1, 1 + len(steps)), low, high, color=color, alpha=0.25, linewidth=0)
        differences.axhline(0, color="C0", linewidth=1)
        differences.set_ylabel(f'difference from "{exact}", %')
        for axes in (curves, differences):
            axes.set_xlabel("step")
            axes.grid(visible=True, alpha=0.3)
            axes.legend()
        figure.suptitle(f"{self.title}\nmean of {len(runs[exact])} seeds, and its standard error", fontsize="medium")
        picture = _BENCHMARKS.parent / "docs" / "images" / f"{self.name}.png"
        with replacing(picture) as unfinished:
            figure.savefig(unfinished, format="png", dpi=110)


_LOSSES: Final[Mapping[str, Callable[[Run], float]]] = {
    f"training loss of the last {_LAST_STEPS} steps": lambda run: fmean(run["losses"][-_LAST_STEPS:]),
    "validation loss": lambda run: float(run["validation_loss"]),
}


def _circumstances() -> dict[str, Any]:
    return circumstances(("torch", "transformers", "lightning", "lightning_memo"))


def _mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    return fmean(values), stdev(values) / sqrt(len(values))
