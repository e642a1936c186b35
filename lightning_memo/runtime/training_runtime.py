"""The hooks through which a training framework drives the engine and the planners."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_memo.artifacts.plan import Plan
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.loss.attach_loss import attach_chunked_loss
from lightning_memo.parallel.batches.token_layout import CurrentLayout
from lightning_memo.parallel.local_tensors import explaining_divided_gradients, explaining_mixed_tensors
from lightning_memo.parallel.parallel_sizes import ParallelSizes
from lightning_memo.parallel.ranks import Ranks
from lightning_memo.runtime.activation_planner import ActivationPlanner
from lightning_memo.runtime.memory_planner import MemoryPlanner
from lightning_memo.runtime.memory_watch import DeviceMemoryWatch, HostMemoryWatch
from lightning_memo.runtime.out_of_memory import OutOfMemoryRetry, ShorterSlices
from lightning_memo.runtime.training_run import ProcessesOfRun, TrainingRun
from lightning_memo.utils.retained_graph import NEVER_DIFFERENTIATED

T = TypeVar("T")

_SIGNS: Final = ("Trying to backward through the graph a second time", NEVER_DIFFERENTIATED)


class TrainingRuntime:
    """Profiles, plans and runs the training of one model.

    A framework calls `start`, then for each batch `begin_batch`, `forward`, `before_backward`, `backward`,
    `after_backward` and `end_batch`, then `end_training`, or `fail` after an exception, and at last `close`. In a batch
    after which an optimizer steps, everything from `forward` to `after_backward` is done inside of `step`.

    Args:
        engine: The engine, attached to the layers of the model.
        model: The model.
        config: The settings of the strategy.
        processes: The processes of the run; `None` if there is only one.
        run: The training run.

    Attributes:
        engine: The engine.
        memory: Plans the memory of steps; `None` if `plan_memory` is off.
    """

    def __init__(
        self, engine: Engine, model: nn.Module, config: MemoConfig, processes: ProcessesOfRun | None, run: TrainingRun
    ) -> None:
        alone = processes is None
        self.engine = engine
        self._attached = contextlib.ExitStack()
        self._run = run
        sizes = ParallelSizes() if processes is None else processes.sizes
        self._explained = functools.partial(explaining_mixed_tensors, sizes.tensor > 1, sizes.shards > 1)
        self._planner = ActivationPlanner(engine, config, Ranks() if processes is None else processes.ranks, run)
        self.memory = MemoryPlanner(engine, self._planner, run) if config.plan_memory else None
        slices = ShorterSlices(engine, config, alone)
        self._retry = OutOfMemoryRetry(engine, self._planner, self.memory, run, slices, alone)
        # Several processes would have to agree after each batch.
        self._host = HostMemoryWatch(engine, self._planner) if alone else None
        budgeted = config.device_memory is not None
        self._device = DeviceMemoryWatch(engine, self._planner, run) if budgeted else None
        self._chunk_loss(model, config, sizes, None if processes is None else processes.current_layout)

    def _chunk_loss(
        self, model: nn.Module, config: MemoConfig, sizes: ParallelSizes, current: CurrentLayout | None
    ) -> None:
        if config.loss_chunk_tokens is None:
            return
        for undo in attach_chunked_loss(
            model,
            config.loss_chunk_tokens,
            shards=sizes.shards,
            vocabulary_parts=sizes.tensor,
            warn=rank_zero_warn,
            current=current,
        ):
            self._attached.callback(undo)

    @property
    def plan(self) -> Plan | None:
        """The plan in force; `None` until the first batch is over."""
        return self._planner.plan

    @property
    def follows_plan(self) -> bool:
        """Whether batches run by `plan`: none is being profiled, and the host memory is locked."""
        return self._planner.follows_plan

    def start(self, resumed_plan: str | None = None) -> None:
        """Prepare for training: load a plan or start without one, and compile the allocator in the background.

        Args:
            resumed_plan: The plan in the checkpoint from which the run is resumed, as JSON; `None` if there is none.

        Raises:
            ValueError: A plan is not usable, or cannot be written.
        """
        self._planner.start(resumed_plan)
        if self.memory is not None:
            self.memory.start()
        self.engine.before_profile = self._before_profile

    def begin_batch(self) -> None:
        """Begin a training batch."""
        self._planner.begin_batch()
        if self.memory is not None:
            self.memory.marks.begin_batch()
        if self._device is not None:
            self._device.begin_batch()

    def begin_again(self) -> None:
        """Forget what was measured of a batch, whose forward is going to run again."""
        self._planner.restart()

    def _before_profile(self) -> None:
        if self.memory is not None:
            self.memory.release()
        self._planner.before_profile()

    def forward(self, forward: Callable[[], T]) -> T:
        """Run the forward of a training step; see :class:`OutOfMemoryRetry`."""
        with self._explained():
            return self._retry.forward(forward)

    def before_backward(self, loss: Tensor | None) -> None:
        """Prepare for the backward pass of a loss; `None` if the backward has just begun, in this thread."""
        self._planner.before_backward()
        if self.memory is not None:
            self.memory.marks.before_backward(loss)
        if self._device is not None:
            self._device.before_backward()

    def backward(self, backward: Callable[[], T]) -> T:
        """Run the backward of a training step; see :class:`OutOfMemoryRetry`."""
        with explaining_earlier_graphs(), explaining_divided_gradients():
            return self._retry.backward(backward)

    def after_backward(self) -> None:
        """Finish the backward pass."""
        self._planner.after_backward()
        if self.memory is not None:
            self.memory.marks.after_backward()
        if self._device is not None:
            self._device.after_backward()

    def step(self, closure: Callable[[], T]) -> T:
        """Run the forward and backward before an optimizer step; see :class:`OutOfMemoryRetry`."""
        return self._retry.step(closure)

    def advise(self, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError | None:
        """Return an error with advice for one from outside of `forward`, `backward` and `step`; `None` for others."""
        return self._retry.advise(error)

    def abandon_batch(self) -> None:
        """Stop in the middle of a batch.

        Checkpoints saved after this contain the random state from before the batch.
        """
        self._retry.rewind()

    def end_batch(self) -> None:
        """Finish a batch and, if one ran, its optimizer step. Makes the plan after the profiled step.

        Raises:
            ValueError: No plan fits the budget.
            torch.OutOfMemoryError: The same, after a step that did not fit the device was cut into slices.
        """
        if self._host is not None:
            self._host.end_batch(self._run.batch)
        with self._retry.naming_host_memory():
            self._planner.end_batch()
        if self.memory is not None:
            self.memory.end_batch()
        if self._device is not None:
            self._device.end_batch()

    def fail(self) -> None:
        """Stop all measurements, as after an exception."""
        self._planner.fail()
        if self.memory is not None:
            self.memory.fail()
        if self._device is not None:
            self._device.fail()

    def end_training(self, model: nn.Module | None) -> None:
        """End training after the last batch: return the planned memory to PyTorch's allocator.

        Args:
            model: The trained model, whose gradients leave the arena.
        """
        self.engine.before_profile = lambda: None
        if self.memory is not None:
            self.memory.close(model)

    def close(self, model: nn.Module | None) -> None:
        """Restore the model, and release all memory.

        Args:
            model: The trained model, whose gradients leave the arena.
        """
        self.fail()  # a batch that has no end is measured still
        self.end_training(model)
        self._retry.close()
        self.engine.detach()
        self._attached.close()


@contextlib.contextmanager
def explaining_earlier_graphs() -> Iterator[None]:
    """Inside, PyTorch's error about a graph that a backward has already used becomes one line.

    A probe finds layers that keep tensors elsewhere, but not those that begin to do so in a later step.

    Raises:
        ValueError: The loss depends on tensors of an earlier forward, or of a recomputation.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(sign in str(error) for sign in _SIGNS):
            raise
        raise ValueError(
            "the loss depends on tensors of an earlier forward, or of a layer that ran again in a backward: if a layer "
            "keeps tensors outside of its modules, arguments and return value (in a global list, for example), let it "
            "return them, or keep them in attributes of its modules; detach() what is kept from one step to the next"
        ) from error
