"""Restores the logged metrics of an interrupted run that resumes in the same folder."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, Logger
from typing_extensions import override


class EarlierMetrics(Callback):
    """Restores the rows of `metrics.csv` up to the checkpoint, because Lightning's logger starts with an empty file.

    Attributes:
        rows: Rows that were read, by the folder of the file.
        last: The last value of each metric that was restored.
    """

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, str]]] = {}
        self.last: dict[str, float] = {}

    def read(self, loggers: Sequence[Logger]) -> None:
        """Reads the rows of earlier runs. Must be called before anything is logged."""
        for logger in loggers:
            if isinstance(logger, CSVLogger) and (path := Path(logger.log_dir, "metrics.csv")).is_file():
                with path.open(newline="") as file:
                    # Lightning's logger writes rows twice if an interrupt occurs between writing and clearing them.
                    once = dict.fromkeys(tuple(row.items()) for row in csv.DictReader(file))
                    self.rows[logger.log_dir] = [dict(row) for row in once]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            for row in _until(trainer.global_step, self.rows.pop(str(logger.log_dir), [])):
                metrics = {name: _number(text) for name, text in row.items() if text}
                self.last.update(metrics)
                logger.log_metrics(metrics, int(metrics.pop("step")))


def _until(global_step: int, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Returns the rows that were logged before the checkpoint. Later rows will be logged again.

    Lightning counts steps from 0, while callbacks log the number of finished steps. Of the rows with the number of the
    checkpoint, those before the last row with a smaller number are from a callback.
    """
    steps = [int(row["step"]) for row in rows]
    end = max((place for place, step in enumerate(steps, 1) if step < global_step), default=0)
    return [row for row, step in zip(rows[:end], steps, strict=False) if step <= global_step]


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
