"""Files about a run: pictures of its schedule, and a page with its plan, pictures and metrics when training ends."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.timeline import Timeline
from lightning_memo.callbacks.lightning_run import log_pictures, logs_now
from lightning_memo.callbacks.monitor import memory_peaks
from lightning_memo.engine.timeline_recorder import TimelineRecorder
from lightning_memo.reports.run_page import NAME, RunReport
from lightning_memo.reports.schedule import draw_schedule, write_trace
from lightning_memo.reports.tables import memory_table, plan_shortage
from lightning_memo.utils.messages import tell
from lightning_memo.utils.units import format_bytes, format_seconds

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
        tell(f"schedule of step {self._step}: {self._folder / PICTURE_FILE}, {TRACE_FILE}")


_CURVES: Final = {
    "Loss (nats)": ("loss",),
    "Tokens per second": ("throughput/tokens_per_second",),
    "Utilisation (% of the peak)": ("throughput/mfu", "throughput/hfu"),
    "Waiting for copies (seconds of a step)": ("memo/stall_seconds",),
    "Learning rate": ("lr",),
}
"""Title of each diagram, and the endings of the names of its metrics."""

_RATES: Final[dict[str, tuple[str, Callable[[float], str]]]] = {
    "throughput/step_seconds": ("a step, median", format_seconds),
    "throughput/tokens_per_second": ("tokens per second, median", "{:,.0f}".format),
    "memo/stall_seconds": ("waiting for copies, median of a step", format_seconds),
    "throughput/mfu": ("MFU, median", "{:.1f} %".format),
    "throughput/hfu": ("HFU, median", "{:.1f} %".format),
}
_MAP: Final = "Memory map: the offset of each buffer of a step"
_SCHEDULE: Final = "Schedule: when a step computes and copies"
_PICTURES: Final = {_MAP: "memory_map.png", "Memory over a step": "memory_curve.png", _SCHEDULE: PICTURE_FILE}
_PAGES: Final = {"Interactive memory map": "memory.html"}


class WriteReport(Callback):
    """Writes `report.html` with the plan, memory map, schedule and metrics when training ends.

    The page is in the run's folder for logs, and needs no network and no other file. It shows the metrics that the
    module and other callbacks log. With several processes, the first one writes it. Add this callback after those that
    log or draw. TensorBoard and Weights & Biases get the pictures of memory as images `memo/memory_map` and
    `memo/memory_curve`.
    """

    def __init__(self) -> None:
        self._history: dict[str, list[tuple[int, float]]] = {}
        self._evaluated: set[str] = set()  # validation metrics, which stay the same until the next validation
        self._started = 0.0
        self._seen = -1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._history, self._evaluated = {}, set()
        self._started, self._seen = time.monotonic(), trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step != self._seen and logs_now(trainer):
            self._note(trainer, set(trainer.callback_metrics) - self._evaluated)
        self._seen = step

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._evaluated |= set(trainer.callback_metrics) - set(self._history)
            self._note(trainer, self._evaluated)

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # all processes have to ask
        if not trainer.is_global_zero:
            return
        memory = getattr(trainer.strategy, "memory", None)
        if memory is not None:
            drawn = [path for path in memory.draw(folder) if path.suffix == ".png"]
            log_pictures(trainer, {f"memo/{path.stem}": path for path in drawn})
        files = {title: folder / name for title, name in _PICTURES.items()}
        report = RunReport(
            title=f"{type(pl_module).__name__}, {_weights(pl_module)} parameters, {trainer.global_step:,} steps",
            facts=self._facts(trainer, trainer.strategy.root_device),  # the module may have left it
            tables=_tables(trainer),
            curves=self._curves(),
            pictures=_absent(trainer) | {title: path for title, path in files.items() if path.is_file()},
            links={title: name for title, name in _PAGES.items() if (folder / name).is_file()},
        )
        report.save(folder / NAME)
        tell(f"report: {folder / NAME}")

    def _note(self, trainer: pl.Trainer, names: set[str]) -> None:
        for name in sorted(names & set(trainer.callback_metrics)):
            self._history.setdefault(name, []).append((trainer.global_step, float(trainer.callback_metrics[name])))

    def _facts(self, trainer: pl.Trainer, device: torch.device) -> dict[str, str]:
        plan = getattr(trainer.strategy, "plan", None)
        facts = {} if plan is None else _answers(plan)
        for name, (title, text) in _RATES.items():
            if name in self._history:
                facts[title] = text(median(value for _, value in self._history[name]))
        facts["training took"] = format_seconds(time.monotonic() - self._started)
        for name, points in self._history.items():
            if name.endswith("loss"):
                facts[f"last {name}"] = f"{points[-1][1]:.4f}"
        for name, size_bytes in memory_peaks(device).items():
            facts[name.replace("/", " ").replace("_bytes", "")] = format_bytes(int(size_bytes))
        return facts | {
            "devices": f"{trainer.world_size} x {_name_of(device)}",
            "precision": str(trainer.precision),
            "PyTorch": torch.__version__,
        }

    def _curves(self) -> dict[str, dict[str, list[tuple[int, float]]]]:
        return {
            title: {name: points for name, points in self._history.items() if name.endswith(ends)}
            for title, ends in _CURVES.items()
        }


def _answers(plan: Plan) -> dict[str, str]:
    """Whether the run fits, and what limits it."""
    needed, there = format_bytes(plan.device_bytes), format_bytes(plan.budget.device_bytes)
    shortage = plan_shortage(plan, can_have_more=True)
    return {
        "fits": f"no, {needed} of {there}" if shortage else f"yes, {needed} of {there}",
        "what limits a step, and what would help": shortage or plan.reason,
    }


def _tables(trainer: pl.Trainer) -> list[Any]:
    plan, memory = getattr(trainer.strategy, "plan", None), getattr(trainer.strategy, "memory", None)
    tables = [] if plan is None else [plan.table, *plan.details]
    use = getattr(memory, "use", None)
    return tables if use is None else [*tables, memory_table(use)]


def _absent(trainer: pl.Trainer) -> dict[str, Path | str]:
    """Reasons to show in place of the memory map and the schedule, if a run of MemoStrategy has none."""
    if getattr(trainer.strategy, "engine", None) is None:
        return {}
    plan, memory = getattr(trainer.strategy, "plan", None), getattr(trainer.strategy, "memory", None)
    plain = plan is not None and plan.swap.plain
    planned = "training ended before memory was planned, or planning failed"
    return {
        _MAP: "plan_memory is off, as by default" if memory is None else planned,
        _SCHEDULE: "nothing was swapped or recomputed" if plain else "no step was recorded",
    }


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _weights(module: torch.nn.Module) -> str:
    """The number of parameters, as short text."""
    count = sum(p.numel() for p in module.parameters())
    return next(
        (f"{count / size:.3g} {name}" for size, name in ((1e9, "B"), (1e6, "M")) if count >= size), f"{count:,}"
    )
