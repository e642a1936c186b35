"""Logs the pictures of a run as images."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger


def log_pictures(trainer: pl.Trainer, pictures: Mapping[str, Path]) -> None:
    """Log PNG files with the loggers that take images: those of TensorBoard and of Weights & Biases.

    Args:
        trainer: Trainer of the run. Its present step is that of the images. Only its first process logs.
        pictures: The files, by the names of the images.
    """
    for logger in trainer.loggers:
        for name, path in pictures.items():
            if isinstance(logger, TensorBoardLogger):
                from matplotlib.image import imread  # the import takes a second

                logger.experiment.add_image(name, imread(path), trainer.global_step, dataformats="HWC")
            elif isinstance(logger, WandbLogger):
                logger.log_image(name, [str(path)], step=trainer.global_step)
