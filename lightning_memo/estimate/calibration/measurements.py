"""Reads measurements from saved plans and from results of benchmarks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_memo.artifacts.plan import Plan
from lightning_memo.estimate.calibration.fitting import LayerMeasurement, Measurement, StepMeasurement
from lightning_memo.shapes.hf_config import shape_of
from lightning_memo.shapes.model_shape import ModelShape

_PLAIN = "plain"


def read_measurements(path: Path, shape: ModelShape) -> tuple[Measurement, ...]:
    """Read a file: a plan, which every run of MemoStrategy saves, or results of `benchmarks/engine.py`.

    Args:
        path: File to read.
        shape: Model of a plan. Results of benchmarks contain their model.

    Returns:
        The measurements; none for results of other benchmarks.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is not JSON, or a plan that is invalid or of another model.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path}: not JSON: give saved plans, or results of benchmarks/engine.py") from None
    if isinstance(content, dict) and "fingerprint" in content:
        costs = Plan.load(path).costs
        origin = f"{shape.name}, {costs.batch} x {costs.tokens} tokens"
        return (LayerMeasurement(origin=origin, shape=shape, costs=costs),)
    return tuple(_steps(path, content))


def _steps(path: Path, content: Any) -> Iterator[StepMeasurement]:
    """Yields the measurements of plain training in the results of a benchmark."""
    try:
        settings = content["model"]
        seconds = [row["median_seconds"] for row in content["results"] if row["method"]["name"] == _PLAIN]
        batch, tokens = settings["batch"], settings["seq_len"]
        shape = shape_of(
            {
                "model_type": "llama",
                "num_hidden_layers": settings["layers"],
                "hidden_size": settings["hidden"],
                "intermediate_size": settings["ffn"],
                "num_attention_heads": settings["heads"],
                "num_key_value_heads": settings["kv_heads"],
                "vocab_size": settings["vocab"],
            },
            path.stem,
        )
    except (KeyError, TypeError):
        return
    for value in seconds:
        if value is not None:
            yield StepMeasurement(origin=path.stem, shape=shape, batch=batch, tokens=tokens, seconds=value)
