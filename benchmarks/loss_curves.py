"""Losses of training runs that differ in one setting: runs the command, writes the raw file, and draws a picture.

Used by `quantised_training.py` and `compressed_activations.py`.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from circumstances import circumstances
from matplotlib.figure import Figure

from lightning_memo.utils.files import replacing

_BENCHMARKS = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Runs whose losses are compared.

    Attributes:
        name: Name of the raw file and of the picture.
        title: Title of the picture.
        settings: Settings of all runs.
        runs: Further settings of each run, by name. The first one is what the others are compared with.
        drawn: Names of the runs in the picture; the first one again first.
        processes: Number of processes of a run.
    """

    name: str
    title: str
    settings: Sequence[str]
    runs: Mapping[str, Sequence[str]]
    drawn: Sequence[str]
    processes: int = 1

    @property
    def results(self) -> Path:
        """The raw file."""
        return _BENCHMARKS / "results" / f"{self.name}.json"

    def main(self, description: str | None) -> None:
        """Train, write the raw file and draw it; with `--draw`, only draw."""
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--draw", action="store_true", help="only draw the picture from the JSON file")
        if not parser.parse_args().draw:
            report: dict[str, Any] = {
                **circumstances(("torch", "transformers", "lightning", "lightning_memo")),
                "settings": list(self.settings),
                "runs": {name: self._train(settings) for name, settings in self.runs.items()},
            }
            with replacing(self.results) as unfinished:
                unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        runs = json.loads(self.results.read_text(encoding="utf-8"))["runs"]
        self._draw({name: runs[name]["losses"] for name in self.drawn})
        first = next(iter(runs.values()))["validation_loss"]
        for name, run in runs.items():
            loss = run["validation_loss"]
            print(f"{name}: {loss:.4f} ({100 * (loss / first - 1):+.2f} %)")

    def _train(self, settings: Sequence[str]) -> dict[str, Any]:
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

    def _draw(self, losses: dict[str, list[float]]) -> None:
        figure = Figure(figsize=(8, 3.6), layout="constrained")
        curves, differences = figure.subplots(1, 2)
        for name, style in zip(losses, ("-", "--", ":"), strict=False):
            curves.plot(range(1, len(losses[name]) + 1), losses[name], style, label=name)
        curves.set_ylabel("training loss, nats per token")
        curves.legend()
        exact, *others = losses
        for name, color in zip(others, ("C1", "C2"), strict=False):
            ratios = [100 * (a / b - 1) for a, b in zip(losses[name], losses[exact], strict=True)]
            differences.plot(range(1, len(ratios) + 1), ratios, color=color, label=name)
        differences.axhline(0, color="C0", linewidth=1)
        differences.set_ylabel(f'difference from "{exact}", %')
        differences.legend()
        for axes in (curves, differences):
            axes.set_xlabel("step")
            axes.grid(visible=True, alpha=0.3)
        figure.suptitle(self.title)
        picture = _BENCHMARKS.parent / "docs" / "images" / f"{self.name}.png"
        with replacing(picture) as unfinished:
            figure.savefig(unfinished, format="png", dpi=110)
