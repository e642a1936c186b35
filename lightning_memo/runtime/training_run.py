"""The runtime's view of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import nn
from torch.optim import Optimizer

from lightning_memo.parallel.batches.token_layout import CurrentLayout
from lightning_memo.parallel.context_parallel import ContextGroups
from lightning_memo.parallel.parallel_sizes import ParallelSizes
from lightning_memo.parallel.ranks import Ranks


class TrainingRun(Protocol):
    """What the runtime reads of a training run. Each training framework has an implementation of its own."""

    @property
    def model(self) -> nn.Module:
        """The model that is trained, as the framework holds it."""

    @property
    def framework_module(self) -> nn.Module | None:
        """The module whose attributes are the framework's, like those of a LightningModule; `None` if none are."""

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

    def folder(self) -> Path | None:
        """Folder for the files of the run; `None` to write none. All processes have to call this at the same time."""

    def note_logged(self) -> Callable[[], None]:
        """Return a function that takes back what the model logs from now on."""

    def log(self, metrics: Mapping[str, float]) -> None:
        """Send metrics of the current step to the loggers."""


class ProcessesOfRun(Protocol):
    """What the runtime reads of the processes of a run, of which there are several."""

    @property
    def sizes(self) -> ParallelSizes:
        """Data, context and tensor parallel sizes."""

    @property
    def ranks(self) -> Ranks:
        """The ranks that must use the same plan."""

    @property
    def context_groups(self) -> ContextGroups | None:
        """Process groups of context-parallel attention; `None` without context parallelism."""

    @property
    def current_layout(self) -> CurrentLayout:
        """Holds the layout of the batch that the model is given."""
