"""Lets a pipeline tell the engine which micro-batch runs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_memo.engine import Engine


class StageLayers:
    """The layers of a pipeline stage, which the engine runs.

    Args:
        engine: The engine.
        in_flight: Largest number of micro-batches in flight, for each block of layers of the stage.
        waiting: Largest number of backwards whose gradients of weights wait.
    """

    def __init__(self, engine: Engine, in_flight: Sequence[int], waiting: int) -> None:
        self._engine = engine
        engine.micro_batches.in_flight, engine.micro_batches.waiting = tuple(in_flight), waiting

    def profiles(self, batch: int, tokens: int) -> bool:
        """Return whether a micro-batch is going to be profiled, or there is no plan yet: it then runs alone."""
        return not self._engine.micro_batches.are_counted or self._engine.profiles(batch, tokens)

    def profile_again(self) -> None:
        """Let the next micro-batch be profiled."""
        self._engine.limits.exceed()

    def begin_micro_batch(self, number: int, block: int, backward: bool, alone: bool) -> None:
        """Begin the forward or the backward of a micro-batch through a block of layers.

        Args:
            number: Its number in the batch.
            block: Number of the block of layers among those of the stage.
            backward: Whether the backward begins.
            alone: Whether no other one is in flight.
        """
        micro_batches = self._engine.micro_batches
        if alone:
            micro_batches.begin_alone(block, backward)
        else:
            micro_batches.begin(number, block, self._engine.swap)

    def buffer_owner(self, t: Tensor) -> object | None:
        """Return what occupies the rounding buffer in which a tensor lies; `None` outside of these."""
        memory = self._engine.memory
        return None if memory is None else memory.buffer_owner(t)

    def note_waiting(self, size_bytes: int) -> None:
        """Take note of the memory that a backward leaves for the gradients of weights."""
        micro_batches = self._engine.micro_batches
        micro_batches.waiting_bytes = max(micro_batches.waiting_bytes, size_bytes)
