"""Measures how well constants that are fitted to short sequences predict the time of a longer one.

    python benchmarks/calibration.py
    python benchmarks/calibration.py --model llama3_2_1b --cluster h200 --lengths 8192 16384 65536

Layers are measured at each length, as in `python -m lightning_memo.estimate calibrate`. Constants are fitted to all
lengths but the last, which is then predicted: the forward, backward and recomputation time of a layer, and the time of
all layers in a step in which everything is recomputed. The results are printed and written to a JSON file.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from circumstances import circumstances, save_report
from rich.console import Console
from rich.table import Table

from lightning_memo.artifacts.costs import LayerCosts
from lightning_memo.cli.calibration_runs import fastest_run
from lightning_memo.estimate.calibrate import LayerMeasurement, fit, steady
from lightning_memo.estimate.cluster import constants_of, load_cluster, load_model, load_preset
from lightning_memo.estimate.planner_inputs import estimated_layer_costs
from lightning_memo.estimate.request import EstimateRequest, Parallelism

_RESULTS = Path(__file__).parent / "results"


def main() -> None:
    options = _options()
    torch.set_num_threads(options.threads)
    settings = load_preset("model", options.model)
    shape, cluster = load_model(options.model), load_cluster(options.cluster)
    runs = [
        LayerMeasurement(
            origin=f"{tokens} tokens", shape=shape, costs=fastest_run(settings, tokens, options.repeats).costs
        )
        for tokens in options.lengths
    ]
    base = replace(constants_of(cluster.name), program="lightning_memo")
    constants, residuals = fit(runs[:-1], cluster, base)
    request = EstimateRequest(
        shape=shape, cluster=cluster, constants=constants, method="memo", gpus=1, seq_len=options.lengths[-1],
        batch_size=1,
    )  # fmt: skip
    measured, predicted = _seconds(steady(runs[-1].costs)), _seconds(estimated_layer_costs(request, Parallelism()))
    report: dict[str, Any] = {
        **circumstances(("torch", "transformers")),
        "settings": {name: getattr(options, name) for name in ("model", "cluster", "lengths", "repeats", "threads")},
        "constants": asdict(constants),
        "fitted": [asdict(residual) for residual in residuals],
        "results": [
            {"what": what, "measured_seconds": measured[what], "predicted_seconds": predicted[what]}
            for what in measured
        ],
    }
    path = options.output / "calibration.json"
    save_report(path, report)
    grid = Table(title=f"{options.lengths[-1]} tokens, constants fitted to {options.lengths[:-1]}")
    for name in ("", "measured", "predicted", "error"):
        grid.add_column(name, justify="right")
    for row in report["results"]:
        told, seconds = row["predicted_seconds"], row["measured_seconds"]
        grid.add_row(row["what"], f"{seconds:.4g} s", f"{told:.4g} s", f"{100 * (told / seconds - 1):+.1f} %")
    console = Console()
    console.print(grid)
    console.print(f"Samples: {path}", highlight=False, soft_wrap=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama_tiny", help="a file in conf/model")
    parser.add_argument("--cluster", default="h100", help="a file in conf/cluster, whose peaks count")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048], help="the last is predicted")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each length; the fastest counts")
    parser.add_argument("--threads", type=int, default=1, help="number of compute threads on the CPU")
    parser.add_argument("--output", type=Path, default=_RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: give at least 1")
    if len(options.lengths) < 2 or min(options.lengths) < 2:
        parser.error(f"--lengths {options.lengths}: give at least two, each of at least 2 tokens")
    return options


def _seconds(costs: LayerCosts) -> dict[str, float]:
    parts = {"forward": costs.forward_seconds, "backward": costs.backward_seconds, "recompute": costs.recompute_seconds}
    return {name: seconds[0] for name, seconds in parts.items()} | {"all layers": sum(map(sum, parts.values()))}


if __name__ == "__main__":
    main()
