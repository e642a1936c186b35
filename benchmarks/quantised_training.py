"""Training loss with weights and gradients that ZeRO sends as integers: the picture in docs/parallelism.md.

    python benchmarks/quantised_training.py
    python benchmarks/quantised_training.py --draw   # draws the picture again from the results, without a run

The demo's model and text, 200 steps in two processes on a CPU with ZeRO 3. The runs differ only in what is sent. Two
more have another seed, for the weights and the order of the text: by so much do losses differ anyway.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from circumstances import circumstances
from matplotlib.figure import Figure

from lightning_memo.config import ZERO_COMMUNICATION
from lightning_memo.utils.files import replacing

_BENCHMARKS = Path(__file__).parent
_RESULTS = _BENCHMARKS / "results" / "quantised_training.json"
_PICTURE = _BENCHMARKS.parent / "docs" / "images" / "quantised_training.png"
_RUNS = {
    **{communication: [f"strategy.zero_communication={communication}"] for communication in ZERO_COMMUNICATION},
    **{f"none, seed {seed}": [f"seed={seed}"] for seed in (43, 44)},
}
_SETTINGS = [
    "experiment=demo", "compare=false", "trainer.devices=2", "trainer.max_steps=200", "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=200", "data.seq_len=512", "strategy.zero_stage=3", "strategy.device_memory=null",
    "strategy.host_memory=null",
]  # fmt: skip


def main() -> None:
    """Trains with every kind of communication, writes the raw file, and draws it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="only draw the picture from the JSON file")
    if not parser.parse_args().draw:
        report: dict[str, Any] = {
            **circumstances(("torch", "transformers", "lightning", "lightning_memo")),
            "settings": _SETTINGS,
            "runs": {name: _train(settings) for name, settings in _RUNS.items()},
        }
        with replacing(_RESULTS) as unfinished:
            unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    runs = json.loads(_RESULTS.read_text(encoding="utf-8"))["runs"]
    _draw({communication: runs[communication]["losses"] for communication in ZERO_COMMUNICATION})
    for name, run in runs.items():
        loss = run["validation_loss"]
        print(f"{name}: {loss:.4f} ({100 * (loss / runs['none']['validation_loss'] - 1):+.2f} %)")


def _train(settings: list[str]) -> dict[str, Any]:
    """The losses of all steps, and the one on the validation text after them."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2",
            "-m", "lightning_memo.train", *_SETTINGS, *settings,
        ]  # fmt: skip
        subprocess.run(command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
        (table,) = Path(folder).glob("outputs/demo/runs/*/csv/metrics.csv")
        with table.open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    losses = [float(row["train_loss"]) for row in rows if row["train_loss"]]
    return {"losses": losses, "validation_loss": [float(row["val_loss"]) for row in rows if row["val_loss"]][-1]}


def _draw(losses: dict[str, list[float]]) -> None:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    curves, differences = figure.subplots(1, 2)
    for communication, style in zip(ZERO_COMMUNICATION, ("-", "--", ":"), strict=True):
        curves.plot(range(1, len(losses[communication]) + 1), losses[communication], style, label=communication)
    curves.set_ylabel("training loss, nats per token")
    curves.legend()
    for communication, color in zip(ZERO_COMMUNICATION[1:], ("C1", "C2"), strict=True):
        ratios = [100 * (a / b - 1) for a, b in zip(losses[communication], losses["none"], strict=True)]
        differences.plot(range(1, len(ratios) + 1), ratios, color=color, label=communication)
    differences.axhline(0, color="C0", linewidth=1)
    differences.set_ylabel('difference from "none", %')
    differences.legend()
    for axes in (curves, differences):
        axes.set_xlabel("step")
        axes.grid(visible=True, alpha=0.3)
    figure.suptitle("zero_communication: the demo's model, ZeRO 3 in two processes, on a CPU")
    with replacing(_PICTURE) as unfinished:
        figure.savefig(unfinished, format="png", dpi=110)


if __name__ == "__main__":
    main()
