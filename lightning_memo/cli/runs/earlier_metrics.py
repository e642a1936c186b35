"""What a run logged before it was interrupted, when it goes on in the same folder."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from typing_extensions import override


class EarlierMetrics(Callback):
    """Puts the rows of `metrics.csv` up to the checkpoint back; Lightning's logger begins an empty file.

    Attributes:
        rows: By file, as they were read.
    """

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, str]]] = {}

    def read(self, loggers: Sequence[Logger]) -> None:
        """Reads what earlier runs left, before anything is logged."""
        for logger in loggers:
            if isinstance(logger, CSVLogger) and (path := Path(logger.log_dir, "metrics.csv")).is_file():
                with path.open(newline="") as file:
                    # Lightning's logger writes rows twice if an interrupt comes between writing and forgetting them.
                    once = dict.fromkeys(tuple(row.items()) for row in csv.DictReader(file))
                    self.rows[logger.log_dir] = [dict(row) for row in once]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            for row in _until(trainer.global_step, self.rows.pop(str(logger.log_dir), [])):
                metrics = {name: _number(text) for name, text in row.items() if text}
                logger.log_metrics(metrics, int(metrics.pop("step")))


def _until(global_step: int, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows that were there when so many steps were over; the others come again.

    Lightning counts steps from 0, and callbacks log by how many are over: of the rows with the checkpoint's number,
    those before the last smaller one are a callback's.
    """
    steps = [int(row["step"]) for row in rows]
    end = max((place for place, step in enumerate(steps, 1) if step < global_step), default=0)
    return [row for row, step in zip(rows[:end], steps, strict=False) if step <= global_step]


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
