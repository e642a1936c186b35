"""A Lightning callback that times some steps of a training run and collects their measurements."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any, Literal, NamedTuple

import lightning.pytorch as pl
import torch
from circumstances import simulated_machine
from lightning.pytorch import Callback
from torch import Tensor
from typing_extensions import override

from cells import activity
from cells.cell import Effort, Result
from cells.memory import begin_peaks, of_device
from lightning_memo.engine.timeline_recorder import Clock, Moment
from lightning_memo.runtime.memory_planner import MemoryState

Stage = Literal["prime", "settling", "warmup", "timed", "observed"]

_MOST = 10_000
_LOSSES = 3  # number of first steps whose losses are kept; all methods have the same
_TELL_SECONDS = 2.0
"""Seconds between reports. A report waits for the device, so short steps do not report each time."""


class _Step(NamedTuple):
    """A step that was run.

    Attributes:
        stage: Why it was run.
        planned: Whether it ran by a plan of the activations.
        memory: The state of memory planning when it began.
        begun: When it began.
        ended: When it ended.
        pace: The device's clock and power while it ended.
    """

    stage: Stage
    planned: bool
    memory: str
    begun: Moment
    ended: Moment
    pace: activity.Pace


class Steps(Callback):
    """Times steps by the device's own clock, without communication between host and device during the steps.

    In the first steps the method settles, some steps warm up, and some are timed. One more step, which is not timed,
    records the waits for copies and, on a GPU, all of its activity.

    Args:
        effort: How many steps of each kind.
        planned: Returns whether steps of this length run by a plan.
        settled: Returns whether the next step is like those that follow. After a while, steps are timed without it.
        memory: Returns the state of memory planning.
        tell: Called after the last step, and after other steps at most once every few seconds.
    """

    most = _MOST

    def __init__(
        self,
        effort: Effort,
        planned: Callable[[], bool],
        settled: Callable[[], bool],
        memory: Callable[[], str],
        tell: Callable[[], None],
    ) -> None:
        self._effort, self._is_planned, self._is_settled, self._tell = effort, planned, settled, tell
        self._memory_state = memory
        self._clock: Clock
        self._stage: Stage = "prime" if effort.prime_tokens else "settling"
        self._ended_settling = self._timed_settled = False
        self._counts: dict[Stage, int] = dict.fromkeys(("prime", "settling", "warmup", "timed", "observed"), 0)
        self._steps: list[_Step] = []
        self._started: Moment = 0.0
        self._begun: tuple[bool, str, Moment] = (False, "", 0.0)
        self._losses: list[Tensor] = []
        self._gradient_norm: Tensor | None = None
        self._observing = ExitStack()
        self._events: list[tuple[str, float, float]] = []
        self._waits: Result | None = None
        self._started_seconds = self._told_seconds = 0.0
        self.memory: Result = {}
        self._computes = simulated_machine() is None

    @property
    def seconds(self) -> list[float]:
        """Seconds of each timed step."""
        return [Clock.seconds(step.begun, step.ended) for step in self._steps if step.stage == "timed"]

    @property
    def median_seconds(self) -> float | None:
        return median(self.seconds) if self._counts["timed"] else None

    def as_json(self) -> Result:
        """Returns everything that was measured so far."""
        return {
            "steps": dict(self._counts),
            "every_step": [
                [step.stage, step.planned, step.memory, Clock.seconds(step.begun, step.ended), *step.pace]
                for step in self._steps
            ],
            # From the start of training to the end of the first step of each kind.
            "first_step_seconds": self._seconds_until(lambda step: True),
            "first_planned_step_seconds": self._seconds_until(lambda step: step.planned),
            "first_served_step_seconds": self._seconds_until(lambda step: step.memory == MemoryState.SERVING.name),
            "settled": self._timed_settled and self._is_settled(),
            "seconds": self.seconds,
            "median_seconds": self.median_seconds,
            "losses": [float(loss) for loss in self._losses] if self._computes else [],
            "gradient_norm": float(self._gradient_norm) if self._computes and self._gradient_norm is not None else None,
            "waits": self._waits,
            "activity": activity.summary(self._events),
            "kernels": activity.kernels(self._events),
        }

    # ---- a step

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._clock = Clock(pl_module.device)
        self._started = self._clock.now()
        self._started_seconds = self._told_seconds = time.perf_counter()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._stage = self._next_stage()
        if self._stage == "timed" and not self._counts["timed"]:
            begin_peaks(pl_module.device)
            self._timed_settled = self._is_settled()
        if self._stage == "observed":
            self._events = self._observing.enter_context(activity.recording(pl_module.device))
            if recorder := _recorder(trainer):
                recorder.start()
        if pl_module.peer.step is not None:
            self._observing.enter_context(pl_module.peer.step)
        self._begun = self._is_planned(), self._memory_state(), self._clock.now()

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if self._gradient_norm is None and self._stage != "prime":
            norms = [
                torch.linalg.vector_norm(p.grad, dtype=torch.float32)
                for p in pl_module.parameters()
                if p.grad is not None
            ]
            self._gradient_norm = torch.linalg.vector_norm(torch.stack(norms))

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ended = self._clock.now()
        self._steps.append(_Step(self._stage, *self._begun, ended, activity.pace(pl_module.device)))
        if self._stage == "timed":
            self.memory = of_device(pl_module.device)
        if self._stage == "observed" and (recorder := _recorder(trainer)):
            timeline = recorder.stop()
            self._waits = {
                "step_seconds": timeline.seconds,
                "waited_seconds": timeline.waited_seconds,
                "copied_seconds": timeline.copied_seconds,
                "copied_bytes": timeline.copied_bytes,
            }
        self._observing.close()
        if self._stage != "prime" and len(self._losses) < _LOSSES:
            self._losses.append(outputs["loss"].detach())
        self._counts[self._stage] += 1
        last = "observed" if self._effort.observe else "timed"
        trainer.should_stop = self._counts[last] >= (1 if last == "observed" else self._effort.repeats)
        if trainer.should_stop or time.perf_counter() - self._told_seconds > _TELL_SECONDS:
            self._tell()
            self._told_seconds = time.perf_counter()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._observing.close()

    def _seconds_until(self, found: Callable[[_Step], bool]) -> float | None:
        """Returns the time from the start of training to the end of the first such step; `None` if there is none."""
        step = next(filter(found, self._steps), None)
        return None if step is None else Clock.seconds(self._started, step.ended)

    def _next_stage(self) -> Stage:
        if self._effort.prime_tokens and not self._counts["prime"]:
            return "prime"
        waited = time.perf_counter() - self._started_seconds
        enough = self._is_settled() or waited > self._effort.settle_seconds
        self._ended_settling = self._ended_settling or (enough and self._is_planned())
        if not self._ended_settling:
            return "settling"
        if self._counts["warmup"] < self._effort.warmup:
            return "warmup"
        return "timed" if self._counts["timed"] < self._effort.repeats else "observed"


def _recorder(trainer: pl.Trainer) -> Any:
    """Returns the waits of the engine's step, or `None` if the engine moves nothing."""
    engine = getattr(trainer.strategy, "engine", None)
    return None if engine is None or engine.memory is None else engine.recorder
