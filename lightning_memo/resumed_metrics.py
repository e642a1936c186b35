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
                    self.rows[logger.log_dir] = list(csv.DictReader(file))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            for row in self.rows.pop(str(logger.log_dir), []):
                metrics = {name: _number(text) for name, text in row.items() if text}
                step = int(metrics.pop("step"))
                if step < trainer.global_step:  # the others come again
                    logger.log_metrics(metrics, step)


def _number(text: str) -> float:
    return int(text) if text.lstrip("-").isdigit() else float(text)
