"""Measures the working set of a step while the engine runs it."""

from __future__ import annotations

from lightning_memo.engine import Engine
from lightning_memo.profiler.memory_meter import Precedence, WorkingSet, WorkingSetMeter
from lightning_memo.utils.messages import tell

_ONLY_ESTIMATED = "another profiler runs, so the memory of the first step is only estimated."


class StepMeter:
    """Measures a step from construction to `stop`; the engine reports when the backward of the layers begins.

    Args:
        engine: The engine that runs the step.
        precedence: Which other measurements this one gives way to on a CPU. That of a later step does so silently.

    Raises:
        RuntimeError: On a CPU, another profiler is running.
    """

    def __init__(self, engine: Engine, precedence: Precedence) -> None:
        self._precedence = precedence
        self._meter = WorkingSetMeter(engine.device, precedence)
        self._engine, self._listener = engine, engine.on_mark
        engine.on_mark = self._mark

    def begin_backward(self) -> None:
        """The forward is over."""
        self._meter.begin_backward()

    def end_backward(self) -> None:
        """The backward is over."""
        self._meter.end_backward()

    def stop(self, accumulating: bool) -> WorkingSet | None:
        """End the measurement.

        Args:
            accumulating: Whether later batches begin with gradients of earlier ones.

        Returns:
            The working set of the step; `None` if another profiler was started in the meantime.
        """
        self._engine.on_mark = self._listener
        swap, memory = self._engine.swap, self._engine.memory
        kept_bytes = (0 if swap is None else swap.memory.buffer_bytes) + (0 if memory is None else memory.device_bytes)
        try:
            return self._meter.stop(kept_bytes, accumulating)
        except RuntimeError:
            if self._precedence is Precedence.FIRST_STEP:
                tell(_ONLY_ESTIMATED)
            return None

    def _mark(self, key: int, name: str) -> None:
        if name == "backward_begin":
            self._meter.begin_layers()
        if self._listener is not None:
            self._listener(key, name)


class MetersSteps:
    """Base of the classes that measure some steps: holds the meter of the current step, if there is one."""

    _meter: StepMeter | None = None

    def start_meter(self, engine: Engine, precedence: Precedence) -> None:
        """Start to measure the current step, unless another profiler is running; see :class:`StepMeter`."""
        try:
            self._meter = StepMeter(engine, precedence)
        except RuntimeError:
            if precedence is Precedence.FIRST_STEP:
                tell(_ONLY_ESTIMATED)
            self._meter = None

    def before_backward(self) -> None:
        """The backward of a batch is about to begin."""
        if self._meter is not None:
            self._meter.begin_backward()

    def after_backward(self) -> None:
        """The backward of a batch is over."""
        if self._meter is not None:
            self._meter.end_backward()

    def stop_meter(self, accumulating: bool) -> WorkingSet | None:
        """The measurement of the current step, which ends here; `None` if there is none."""
        meter, self._meter = self._meter, None
        return None if meter is None else meter.stop(accumulating)
