"""A step that runs out of device memory is run once more, with every layer recomputed, and planned anew."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_memo.callbacks.planning.plan_after_first_step import PlanAfterFirstStep
from lightning_memo.callbacks.planning.plan_memory import PlanMemory
from lightning_memo.engine import Engine
from lightning_memo.kernels.rng_state import RngState

T = TypeVar("T")

_SHRUNK_SHARE = 0.9  # of what a plan expected that was too large
_ADVICE = (
    "shorten the sequence or the batch, set slice_tokens (host_backed='all' takes the least), or lower "
    "loss_chunk_tokens; python -m lightning_memo.estimate tells what fits"
)


class OutOfMemoryRetry:
    """Stands around the forward of each batch, and around forward and backward together where an optimizer steps.

    What is run again starts from the same random state and, as far as the backward had begun, from no gradients: its
    numbers are those of a step that did not fail. What a training_step does beside its loss it does twice.

    Args:
        engine: Runs the layers.
        planning: Makes the plans.
        memory: Plans the places of buffers, if anything does.
        alone: Whether this is the only process: others would wait for this one in the middle of a step.
    """

    def __init__(self, engine: Engine, planning: PlanAfterFirstStep, memory: PlanMemory | None, alone: bool) -> None:
        self._engine, self._planning, self._memory, self._alone = engine, planning, memory, alone
        self._random: RngState | None = None
        self._batch, self._retried = (-1, -1), False

    def forward(self, trainer: pl.Trainer, step: Callable[[], T]) -> T:
        """Run a training step's forward.

        Raises:
            torch.OutOfMemoryError: It takes more device memory than there is, even with every layer recomputed.
        """
        batch = (trainer.global_step, trainer.fit_loop.batch_idx)
        if batch != self._batch:
            self._batch, self._retried = batch, False
        self._note_random_state()
        return self._run(trainer, step)

    def rewind(self) -> None:
        """The batch does not go on: random numbers are as if it had not begun, as a checkpoint takes them."""
        if self._random is not None:
            self._random.restore()

    def _note_random_state(self) -> None:
        """Keep the present state, in the memory of the one before: planned buffers do not live from step to step."""
        present = RngState.capture(self._engine.device)
        if self._random is None:
            self._random = present
            return
        self._random.cpu.copy_(present.cpu)
        if self._random.accelerator is not None and present.accelerator is not None:
            self._random.accelerator.copy_(present.accelerator)

    def backward(self, trainer: pl.Trainer, backward: Callable[[], T]) -> T:
        """Run a training step's backward, which `step` runs again with its forward, unless gradients would be lost.

        Raises:
            torch.OutOfMemoryError: It takes more device memory than there is.
        """
        try:
            return backward()
        except torch.OutOfMemoryError as error:
            if trainer.accumulate_grad_batches > 1:
                raise _told(
                    error, "its backward is not run again, as gradients of earlier batches would be lost"
                ) from error
            raise

    def step(self, trainer: pl.Trainer, closure: Callable[[], T]) -> T:
        """Run forward and backward of the last batch before an optimizer steps.

        Raises:
            torch.OutOfMemoryError: As of `forward` and `backward`.
        """
        return self._run(trainer, closure)

    def _run(self, trainer: pl.Trainer, work: Callable[[], T]) -> T:
        try:
            return work()
        except _ToldError:
            raise
        except torch.OutOfMemoryError as error:
            if why_not := self._why_not(trainer):
                raise _told(error, why_not) from error
            message = _first_line(error)
        # Here the error is gone, and with it the frames and the graph that hold memory.
        self._retried = True
        self._make_room(message)
        assert self._random is not None
        self._random.restore()
        return work()

    def _why_not(self, trainer: pl.Trainer) -> str:
        """Why it cannot be run again; empty if it can."""
        if self._retried or self._engine.profile is not None or self._engine.swap is None:
            return "even with every layer recomputed"
        if not self._planning.can_shrink:
            return "no plan takes less than alpha=0"
        if not self._alone:
            return "with several processes it is not run again"
        assert trainer.lightning_module is not None
        return "" if trainer.lightning_module.automatic_optimization else "manual optimization is not run again"

    def _make_room(self, told: str) -> None:
        plan = self._planning.plan
        assert plan is not None
        was = "plain training" if plan.swap.mode == "plain" else f"alpha={plan.swap.alpha:.4g}"
        rank_zero_warn(
            f"MemoStrategy: out of device memory with {was} ({told}); the step is run again with every layer "
            "recomputed, and later ones are planned with less."
        )
        self._planning.shrink(_SHRUNK_SHARE * plan.device_bytes)
        if self._memory is not None:
            self._memory.release()
        gc.collect()
        if self._engine.device.type == "cuda":
            torch.cuda.empty_cache()


class _ToldError(torch.OutOfMemoryError):
    """Says what to do already."""


def _told(error: torch.OutOfMemoryError, why: str) -> _ToldError:
    return _ToldError(f"{_first_line(error)} MemoStrategy: the step does not fit the device, {why}: {_ADVICE}")


def _first_line(error: torch.OutOfMemoryError) -> str:
    return (str(error) or "out of memory").splitlines()[0][:200]
