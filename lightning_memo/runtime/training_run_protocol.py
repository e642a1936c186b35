"""The runtime's view of a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import nn
from torch.optim import Optimizer


class TrainingRun(Protocol):
    """What the runtime reads of a training run. Each training framework has an implementation of its own."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained, as the framework holds it."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the run."""

    @property
    def precision(self) -> str:
        """The precision setting, for example "bf16-mixed"."""

    @property
    def rank(self) -> int:
        """Global rank of this process."""

    @property
    def processes(self) -> int:
        """Number of processes of the run."""

    @property
    def accumulated_batches(self) -> int:
        """Number of batches whose gradients the next optimizer step adds up."""

    @property
    def gradient_clip(self) -> float | None:
        """Value or norm to which gradients are clipped; `None` if they are not."""

    @property
    def automatic_optimization(self) -> bool:
        """Whether the framework, rather than the user's code, runs the backward and the optimizers."""

    @property
    def step(self) -> int:
        """Number of optimizer steps done so far."""

    @property
    def batch(self) -> int:
        """Index of the current batch in its epoch."""

    @property
    def logs_now(self) -> bool:
        """Whether metrics of the current step are logged."""

    def folder(self) -> Path:
        """Folder for the files of the run. All processes have to call this method at the same time."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Send metrics of the current step to the loggers."""
