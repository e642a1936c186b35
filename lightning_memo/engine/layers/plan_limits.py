"""The batches that the plan in force covers."""

from __future__ import annotations

from lightning_memo.engine.modules.requested_settings import RequestedSettings


class PlanLimits:
    """Decides whether a plan covers a batch, or the batch has to be profiled.

    Args:
        settings: The settings that were requested.

    Attributes:
        largest: Largest number of tokens of a layer call so far, all sequences together.
    """

    def __init__(self, settings: RequestedSettings) -> None:
        self._settings = settings
        self._tokens = self.largest = 0
        self._calls: int | None = None
        self._exceeded = self._profiled_short = False

    def plan(self, tokens: int, calls: int) -> None:
        """A plan is loaded.

        Args:
            tokens: Number of tokens of the batch that the plan was made for, all sequences together.
            calls: Number of layer calls that the plan was made for.
        """
        self._tokens, self._calls, self._exceeded = tokens, calls, False

    def profile(self, tokens: int, short: bool) -> None:
        """A profiled step begins.

        Args:
            tokens: Number of tokens of its batch, all sequences together.
            short: Whether the batch needs no slices, and later batches may.
        """
        self._tokens, self._calls, self._exceeded = tokens, None, False
        self._profiled_short = short

    def begin_call(self, number: int, tokens: int = 0, parts: int = 1) -> None:
        """A layer call begins.

        Args:
            number: Number of layer calls that are alive already.
            tokens: Number of tokens of the call, all sequences together, if it may have more than the first call.
            parts: Number of calls into which each call of the plan is divided.
        """
        self.largest = max(self.largest, tokens)
        if self._calls is not None and (number >= self._calls * parts or tokens > self._tokens):
            self._exceeded = True  # more calls or tokens before a backward than were planned: these stay on the device

    def exceed(self) -> None:
        """The plan covers no more batches: the next one is profiled."""
        self._exceeded = True

    def covers(self, batch: int, tokens: int) -> bool:
        """Return whether the plan covers `batch` sequences of `tokens` tokens."""
        # What a batch without slices saves does not show what batches with slices save.
        sliced_now = self._profiled_short and tokens > (self._settings.slice_tokens or tokens)
        return not self._exceeded and not sliced_now and batch * tokens <= self._tokens
