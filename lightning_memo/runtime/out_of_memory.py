"""Runs a step that ran out of device memory again: with every layer recomputed, then in more and more slices."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_memo.artifacts.swap_plan import StreamFromHost
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.planner import HostMemoryError
from lightning_memo.planner.token_slices import TILE_TOKENS
from lightning_memo.runtime.activation_planner import ActivationPlanner
from lightning_memo.runtime.memory_planner import MemoryPlanner
from lightning_memo.runtime.step_state import StepState
from lightning_memo.runtime.training_run import TrainingRun
from lightning_memo.utils.free_memory import free_device_bytes

T = TypeVar("T")

_SHRUNK_SHARE: Final = 0.9  # of the device memory that a too large plan expected to use
_ESTIMATE: Final = "python -m lightning_memo.estimate shows what fits"

# Number of slices of a sequence, and what lives on the host besides swapped activations: the fastest comes first.
# Slices of a length that the user gave stay as long.
_LADDER: Final[tuple[tuple[int, StreamFromHost], ...]] = ((16, "none"), (32, "attention"), (64, "hidden"))
_MOVED: Final = {"none": 0, "auto": 1, "attention": 1, "hidden": 2}  # by what lives on the host


class OutOfMemoryRetry:
    """Runs the forward of each batch, and forward and backward together where an optimizer steps.

    Another attempt starts from the same state (see :class:`StepState`), and without gradients if the backward had
    begun. Its results are those of a step that did not fail. Other side effects of the user's training step
    happen twice.

    Args:
        engine: The engine of the run.
        planner: Makes the plans.
        memory: Plans the memory of steps; `None` if it is not planned.
        run: The training run.
        slices: Cuts layers into slices.
        alone: Whether this is the only process. Others would wait for this one in the middle of a step.
    """

    def __init__(
        self,
        engine: Engine,
        planner: ActivationPlanner,
        memory: MemoryPlanner | None,
        run: TrainingRun,
        slices: ShorterSlices,
        alone: bool,
    ) -> None:
        self._engine, self._planner, self._memory, self._run = engine, planner, memory, run
        self._slices, self._alone = slices, alone
        self._state: StepState | None = None
        self._batch, self._retried = (-1, -1), False
        self._take_back_logs: Callable[[], None] = lambda: None
        self._steps = False  # whether an optimizer steps after the present batch
        self._cut_after = ""  # the out-of-memory error after which layers were cut into slices; empty if they were not

    def close(self) -> None:
        """Forget the state of the last step: PyTorch swaps no tensor to which a weak reference exists."""
        self._state = None

    def forward(self, forward: Callable[[], T]) -> T:
        """Run the forward of a training step.

        Raises:
            torch.OutOfMemoryError: The device has too little memory, even with every layer recomputed.
        """
        batch = (self._run.step, self._run.batch)
        again = batch == self._batch
        if not again:
            self._batch, self._retried = batch, False
            self._take_back_logs = self._run.note_logged()
        if self._state is None:
            self._state = StepState(self._run.model, self._engine.device, without=self._run.framework_module)
        else:
            self._state.note(again)
        return self._run_with_retry(forward)

    def backward(self, backward: Callable[[], T]) -> T:
        """Run the backward of a training step. `step` runs it again together with the forward.

        Raises:
            torch.OutOfMemoryError: The device has too little memory. The backward is run again neither if it adds to
                gradients of earlier batches, which would be lost, nor outside of `step`, where there is no forward.
        """
        state = self._state
        adds = state is not None and state.holds_gradients
        try:
            return backward()
        except torch.OutOfMemoryError as error:
            if adds:
                why = "its backward is not run again, as gradients of earlier batches would be lost"
                raise self._explained(error, why) from error
            if self._run.automatic_optimization and not self._steps:
                why = "the backward of a batch after which no optimizer steps is not run again"
                raise self._explained(error, why) from error
            if state is not None:
                state.drop_gradients()  # some weights have theirs already
            raise

    def step(self, closure: Callable[[], T]) -> T:
        """Run the forward and backward of the last batch before an optimizer steps.

        Raises:
            torch.OutOfMemoryError: As for `forward` and `backward`.
        """
        self._steps = True
        try:
            return self._run_with_retry(closure)
        finally:
            self._steps = False

    @contextlib.contextmanager
    def naming_host_memory(self) -> Iterator[None]:
        """Inside, a lack of host memory for slices is that of device memory for which layers were cut.

        Shorter slices would need more host memory still, because more of a step lives there.

        Raises:
            torch.OutOfMemoryError: Slices that were cut for a step that did not fit the device do not fit the host.
        """
        try:
            yield
        except (HostMemoryError, MemoryError) as error:
            if not self._cut_after:
                raise
            raise _ExplainedError(
                f"{self._cut_after} lightning_memo: the step does not fit the device, and in slices, which take less "
                f"of it, not the host ({_first_line(error)}): shorten the sequence or the batch, raise host_memory, or "
                f"use a device with more memory; {_ESTIMATE}"
            ) from error

    def rewind(self) -> None:
        """Restore the state from the beginning of the current batch, which is abandoned."""
        if self._state is not None:
            self._state.restore()

    def _run_with_retry(self, work: Callable[[], T]) -> T:
        while True:
            try:
                with self.naming_host_memory():
                    return work()
            except _ExplainedError:
                raise
            except torch.OutOfMemoryError as error:
                if why_not := self._why_not():
                    raise self._explained(error, why_not) from error
                message = _first_line(error)
            # The error is gone here, and with it the frames and the autograd graph that hold memory.
            self._make_room(message)
            assert self._state is not None
            self._state.restore()
            self._take_back_logs()

    def _why_not(self) -> str:
        """Why the step cannot be run again; empty if it can."""
        if not (self._can_shrink or self._slices.can_cut):
            return "even with every layer recomputed" if self._is_smallest else "no plan takes less than alpha=0"
        if not self._alone:
            return "with several processes it is not run again"
        if not self._run.automatic_optimization:
            return "manual optimization is not run again"
        lost = "" if self._state is None else self._state.lost()
        return lost and f"it is not run again, because it has changed {lost}, of which there is no copy"

    @property
    def _is_smallest(self) -> bool:
        """Whether every layer was recomputed as a whole, or in the present slices."""
        return self._retried or self._engine.profile is not None or self._engine.swap is None

    @property
    def _can_shrink(self) -> bool:
        return self._planner.can_shrink and not self._is_smallest

    def _make_room(self, message: str) -> None:
        if self._can_shrink:
            self._retried = True
            self._shrink_plan(message)
        else:
            self._cut_after = message
            self._planner.restart()
            shorter = self._slices.cut()
            rank_zero_warn(
                f"lightning_memo: out of device memory with every layer recomputed ({message}); this step is run "
                f"again, like later ones, with {shorter}: give these settings to begin with them."
            )
        if self._memory is not None:
            self._memory.release()
        gc.collect()
        device = self._engine.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            # The device may have less than the user's budget: another process, or a smaller device than planned for.
            whole_bytes = free_device_bytes(device) + torch.cuda.memory_allocated(device)
            self._planner.limit_device(_SHRUNK_SHARE * whole_bytes)

    def advise(self, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError | None:
        """Return an error with advice for one that no method here has seen; `None` for others, which have some."""
        if isinstance(error, _ExplainedError):
            return None
        return self._explained(error, "and only `memo.step(...)` runs more than the first forward of a batch again")

    def _explained(self, error: torch.OutOfMemoryError, why: str) -> _ExplainedError:
        return _ExplainedError(
            f"{_first_line(error)} lightning_memo: the step does not fit the device, {why}: {self._slices.advice}; "
            f"{_ESTIMATE}"
        )

    def _shrink_plan(self, message: str) -> None:
        plan = self._planner.plan
        assert plan is not None
        mode = "plain training" if plan.swap.plain else f"alpha={plan.swap.alpha:.4g}"
        rank_zero_warn(
            f"lightning_memo: out of device memory with {mode} ({message}); the step is run again with every layer "
            "recomputed, and later ones are planned with less."
        )
        self._planner.limit_device(_SHRUNK_SHARE * plan.device_bytes)
        self._planner.shrink()


class _ExplainedError(torch.OutOfMemoryError):
    """An out-of-memory error whose message already advises the user."""


def _first_line(error: Exception) -> str:
    return (str(error) or "out of memory").splitlines()[0][:200]


class ShorterSlices:
    """Cuts layers into more and more slices, as long as a step does not fit the device.

    A slice recomputes only its own activations. Keys and values, and then hidden states, move to the host last.

    Args:
        engine: The engine of the run.
        config: The settings of the strategy. Slices that they ask for are left as they are.
        alone: Whether this is the only process.
    """

    def __init__(self, engine: Engine, config: MemoConfig, alone: bool) -> None:
        self._engine, self._config, self._tried = engine, config, 0
        self._given = None if config.slice_tokens == "auto" else int(config.slice_tokens)
        free = self._given is None or config.stream_from_host == "auto"
        self._may = alone and free and not engine.settings.joint_attention
        # Layers of several stacks, and those that go to a disk, leave the device as a whole.
        self._whole = config.disk_path is not None or engine.settings.stacks > 1
        self._ladder = _LADDER[:1] if self._whole or config.stream_from_host == "none" else _LADDER

    @property
    def can_cut(self) -> bool:
        """Whether there are shorter slices to try."""
        classes = self._engine.layer_classes
        return self._may and not (classes.unsliceable or classes.needs_full_attention) and bool(self._next())

    def cut(self) -> str:
        """Cut layers into the next shorter slices, and return what to set to begin with them."""
        self._tried, tokens, stream = self._next()[0]
        self._engine.cut(tokens, stream)
        return f'slice_tokens={tokens}, stream_from_host="{stream}"'

    @property
    def advice(self) -> str:
        """What takes less device memory, as far as settings and layers allow it."""
        ways = ["shorten the sequence or the batch", self._slices_advice]
        ways.append("lower loss_chunk_tokens" if self._config.loss_chunk_tokens else "set loss_chunk_tokens")
        ways = [way for way in ways if way]
        return f"{', '.join(ways[:-1])}, or {ways[-1]}"

    @property
    def _slices_advice(self) -> str:
        config, settings, classes = self._config, self._engine.settings, self._engine.layer_classes
        if classes.unsliceable or settings.slice_tokens == 1:
            return ""
        way = "set slice_tokens"
        if settings.slice_tokens is not None:
            given = config.slice_tokens != "auto"
            way = "lower slice_tokens" if given else f"set slice_tokens below {settings.slice_tokens}"
        joint = bool(classes.needs_full_attention) or settings.joint_attention
        more = not (self._whole or joint or settings.stream_from_host in ("hidden", "model"))
        return f"{way} (stream_from_host='hidden' takes less)" if more else way

    def _next(self) -> list[tuple[int, int, StreamFromHost]]:
        """The rest of the ladder: number of the rung, tokens of a slice, and what lives on the host."""
        whole, settings = self._engine.profiled_tokens, self._engine.settings
        if self._given is None:
            rungs = [(n, _tiled(whole, slices), backed) for n, (slices, backed) in enumerate(self._ladder, 1)]
            return [rung for rung in rungs if rung[0] > self._tried and rung[1] < (settings.slice_tokens or whole)]
        moved = _MOVED[settings.stream_from_host]
        rungs = [(n, self._given, backed) for n, (_, backed) in enumerate(self._ladder, 1) if _MOVED[backed] > moved]
        return rungs if self._given < whole else []


def _tiled(tokens: int, slices: int) -> int:
    each = max(-(-tokens // slices), 1)
    tile = TILE_TOKENS if each > TILE_TOKENS else 1
    return -(-each // tile) * tile
