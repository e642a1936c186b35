"""Lets a pipeline tell the engine which micro-batch runs."""

from __future__ import annotations

from lightning_memo.engine import Engine


class StageLayers:
    """The layers of a pipeline stage, which the engine runs.

    Args:
        engine: The engine.
        in_flight: Largest number of micro-batches in flight.
    """

    def __init__(self, engine: Engine, in_flight: int) -> None:
        self._engine = engine
        engine.micro_batches.in_flight = in_flight

    def profiles(self, batch: int, tokens: int) -> bool:
        """Return whether a micro-batch is going to be profiled; see `Engine.profiles`."""
        return self._engine.profiles(batch, tokens)

    def begin_micro_batch(self, number: int, alone: bool) -> None:
        """Begin or continue a micro-batch.

        Args:
            number: Its number in the batch.
            alone: Whether no other one is in flight.
        """
        self._engine.micro_batches.begin(number, None if alone else self._engine.swap)
