"""A training loop of the user's own, as the runtime sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_memo.parallel.batches.current_layout import CurrentLayout
from lightning_memo.parallel.parallel_sizes import ParallelSizes
from lightning_memo.parallel.ranks import Ranks, processes_on_this_node

_BITS: Final = {torch.float64: "64", torch.float32: "32", torch.bfloat16: "bf16"}


class LoopRun:
    """Implements :class:`~lightning_memo.runtime.training_run_protocol.TrainingRun` for a loop.

    Args:
        model: The model that is trained.
        optimizers: Its optimizers.
        output_dir: Folder for the plan; `None` to write none.

    Attributes:
        step: Number of optimizer steps done so far.
        batch: Number of batches begun so far.
        precision: The precision of the layers, known once the first layer has run.
    """

    framework_module = None
    gradient_clip = None
    automatic_optimization = True
    logs_now = False

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], output_dir: str | Path | None) -> None:
        self.model, self.optimizers = model, optimizers
        self._folder = None if output_dir is None else Path(output_dir)
        self.step = self.batch = 0
        self.precision = ""
        self._since_step, self._stepped = 0, False

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def processes(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    @property
    def accumulated_batches(self) -> int:
        # A batch without an optimizer step tells that there will be another one before it.
        return self._since_step if self._stepped else self._since_step + 1

    def begin_batch(self) -> None:
        """Count a batch."""
        self.batch += 1
        self._since_step = 1 if self._stepped else self._since_step + 1
        self._stepped = False

    def count_step(self) -> None:
        """Count an optimizer step."""
        self.step += 1
        self._stepped = True

    def note_precision(self, dtype: torch.dtype, device_type: str) -> None:
        """Note in which precision a layer runs.

        Args:
            dtype: Type of the weights.
            device_type: Type of the device.

        Raises:
            ValueError: The precision is float16.
        """
        mixed = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if mixed else dtype
        if dtype is torch.float16:
            raise ValueError("layers run in float16, which is not supported: use bfloat16")
        self.precision = f"{_BITS.get(dtype, str(dtype))}-{'mixed' if mixed else 'true'}"

    def folder(self) -> Path | None:
        return self._folder

    def note_logged(self) -> Callable[[], None]:
        return lambda: None

    def log(self, metrics: Mapping[str, float]) -> None:
        raise AssertionError("a loop has no loggers")


@dataclass(frozen=True, slots=True)
class LoopProcesses:
    """The processes of a loop, each with batches of its own. The loop divides the model and averages gradients.

    Attributes:
        sizes: Data, context and tensor parallel sizes.
        ranks: The ranks that must use the same plan.
        current_layout: Holds no layout: each process has all tokens of its batches.
        context_groups: None, as no tokens are divided.
    """

    sizes: ParallelSizes
    ranks: Ranks
    current_layout: CurrentLayout = field(default_factory=CurrentLayout)
    context_groups: None = None

    @classmethod
    def initialized(cls) -> LoopProcesses | None:
        """Return the processes of the default group; `None` if there is only this one. All processes call it."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return None
        count = dist.get_world_size()
        # Whether the loop shards its state is not known; bytes are measured.
        ranks = Ranks(f"dp{count} of a loop", processes_on_this_node(), in_step=None, world=True)
        return cls(ParallelSizes(data=count), ranks)
