"""Callbacks that record what a test compares."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from lightning_memo.allocator import AllocatorStats


@dataclass
class Watch(Callback):
    """Waits for planning in the background, so that all runs switch at the same step, and records the counters."""

    stats: list[AllocatorStats] = field(default_factory=list)

    def on_train_batch_end(self, trainer, *args):
        memory = trainer.strategy.memory
        deadline = time.monotonic() + 120
        while memory.busy and time.monotonic() < deadline:
            time.sleep(0.002)
        if memory.stats is not None:
            self.stats.append(memory.stats)


class Pause(Callback):
    """Waits for a signal in the fourth step of the job of a sweep whose number is `PAUSED_JOB` in the environment.

    While it waits, the job's folder has a file of the name `paused`.
    """

    @override
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        job = Path(trainer.checkpoint_callback.dirpath).parent
        if job.name == os.environ.get("PAUSED_JOB") and trainer.is_global_zero and trainer.global_step == 3:
            (job / "paused").touch()
            deadline = time.monotonic() + 300
            while not trainer.received_sigterm and time.monotonic() < deadline:
                time.sleep(0.01)


class Gradients(Callback):
    """Records the gradients of the last step and the bytes that did not fit into the plan."""

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        trained = ((name, p.grad) for name, p in pl_module.named_parameters())
        self.last: dict[str, Tensor] = {name: g.clone() for name, g in trained if g is not None}

    @override
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        engine = getattr(trainer.strategy, "engine", None)
        self.overflow_bytes = 0 if engine is None or engine.memory is None else engine.memory.stats.overflow_bytes
