"""Records the schedule of one step, and writes it as a picture and as a trace file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_memo.artifacts.timeline import Timeline
from lightning_memo.callbacks.lightning_run import log_pictures
from lightning_memo.engine.timeline_recorder import TimelineRecorder
from lightning_memo.reports.schedule import draw_schedule, write_trace

PICTURE_FILE, TRACE_FILE = "schedule.png", "schedule.trace.json"
_DEFAULT_STEP = 6


class ScheduleRecorder(Callback):
    """Records when a step computes and copies; see `docs/schedule.md`.

    A step is all micro-batches of an optimizer step. Recording does not change its results, and no other step is
    recorded. With several processes, the first one records its own step. TensorBoard and Weights & Biases get the
    picture as image `memo/schedule`.

    Args:
        step: Index of the optimizer step in this run, from 0. Step 0 is profiled, and the next three may be recorded to
            plan memory. `None` records step 6, or the last step of a shorter run, writes the files when training ends,
            and is silent if there is nothing to write.
        folder: Folder for the files. `None` is the run's folder for logs.

    Attributes:
        timeline: The recorded step; `None` until it is over.

    Raises:
        ValueError: `step` is negative.
    """

    def __init__(self, step: int | None = 6, folder: str | Path | None = None) -> None:
        if step is not None and step < 0:
            raise ValueError(f"step={step}: give the number of an optimizer step, 0 or more")
        self.timeline: Timeline | None = None
        self._given_step, self._given_folder = step, folder
        self._step = step or 0
        self._recorder: TimelineRecorder | None = None
        self._folder = Path()
        self._first_step = 0
        self._written = False

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # All processes have to ask Lightning for its folder at the same time.
        self._folder = Path(self._given_folder or trainer.log_dir or trainer.default_root_dir)
        self._first_step, self._written, self.timeline = trainer.global_step, False, None
        if self._given_step is None:
            self._step = int(min(_DEFAULT_STEP, trainer.estimated_stepping_batches - trainer.global_step - 1))
        engine = getattr(trainer.strategy, "engine", None)
        if engine is None and self._given_step is not None:
            rank_zero_warn(
                f"ScheduleRecorder: {type(trainer.strategy).__name__} has no schedule to record; train with "
                "MemoStrategy, or leave the callback out."
            )
        long_enough = self._given_step is not None or self._step > 0
        self._recorder = engine.recorder if engine is not None and trainer.is_global_zero and long_enough else None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._given_step is not None:
            self._write(trainer)  # between steps, so that no step takes longer
        if self._recorder is not None and self._is_now(trainer) and not self._recorder.on:
            self._recorder.start()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._recorder is not None and self._recorder.on and not self._is_now(trainer):
            self.timeline = self._recorder.stop()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer)
        if self._recorder is not None and self.timeline is None and self._given_step is not None:
            rank_zero_warn(f"ScheduleRecorder: training ended before step {self._step} was over; nothing is written.")

    def _is_now(self, trainer: pl.Trainer) -> bool:
        return trainer.global_step == self._first_step + self._step

    def _write(self, trainer: pl.Trainer) -> None:
        if self.timeline is None or self._written:
            return
        self._written = True
        if not self.timeline.spans:
            if self._given_step is None:
                return
            rank_zero_warn(
                f"ScheduleRecorder: step {self._step} swapped and recomputed nothing, so no schedule is written. "
                "Train on longer sequences, or set a smaller device_memory."
            )
            return
        draw_schedule(self.timeline, self._folder / PICTURE_FILE, f"Step {self._step}")
        write_trace(self.timeline, self._folder / TRACE_FILE)
        log_pictures(trainer, {"memo/schedule": self._folder / PICTURE_FILE})
        rank_zero_info(f"lightning_memo: schedule of step {self._step}: {self._folder / PICTURE_FILE}, {TRACE_FILE}")
