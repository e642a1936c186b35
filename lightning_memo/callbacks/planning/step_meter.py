"""The working set of a profiled step, measured while the engine runs it."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from typing_extensions import override

from lightning_memo.engine import Engine
from lightning_memo.profiler.memory_meter import WorkingSet, WorkingSetMeter

_ONLY_ESTIMATED = "MemoStrategy: another profiler runs, so the memory of the first step is only estimated."


class StepMeter:
    """Measures a step from construction to `stop`, and listens to the engine for when the backward of layers begins.

    Args:
        engine: Runs the step.
        gives_way: On a CPU, end without an answer, and without a word, where something else is measured meanwhile.

    Raises:
        RuntimeError: On a CPU, another profiler is running.
    """

    def __init__(self, engine: Engine, gives_way: bool = False) -> None:
        self._gives_way = gives_way
        self._meter = WorkingSetMeter(engine.device, gives_way)
        self._engine, self._listener = engine, engine.on_mark
        engine.on_mark = self._mark

    def begin_backward(self) -> None:
        """The forward is over."""
        self._meter.begin_backward()

    def end_backward(self) -> None:
        """The backward is over."""
        self._meter.end_backward()

    def stop(self, accumulating: bool) -> WorkingSet | None:
        """What the step took (`accumulating`: later ones begin with gradients); `None` if another profiler began."""
        self._engine.on_mark = self._listener
        try:
            return self._meter.stop(0 if self._engine.swap is None else self._engine.swap.buffer_bytes, accumulating)
        except RuntimeError:
            if not self._gives_way:
                rank_zero_info(_ONLY_ESTIMATED)
            return None

    def _mark(self, key: int, name: str) -> None:
        if name == "backward_begin":
            self._meter.begin_layers()
        if self._listener is not None:
            self._listener(key, name)


def meter_step(engine: Engine, gives_way: bool = False) -> StepMeter | None:
    """Starts measuring; `None` where another profiler is running already."""
    try:
        return StepMeter(engine, gives_way)
    except RuntimeError:
        if not gives_way:
            rank_zero_info(_ONLY_ESTIMATED)
        return None


class MeteringCallback(Callback):
    """Tells a meter, where one measures the batch, when the backward begins and ends."""

    _meter: StepMeter | None = None

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: torch.Tensor) -> None:
        if self._meter is not None:
            self._meter.begin_backward()

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._meter is not None:
            self._meter.end_backward()
