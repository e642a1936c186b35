"""Decides which length to try next. The state is the list of attempts, so that a search can resume at any time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Result of training steps at one length. Sizes are None if the attempt ended before they were known."""

    tokens: int
    fits: bool
    reason: str = ""
    """Why it does not fit, in one line."""

    planned_device_bytes: int | None = None
    peak_device_bytes: int | None = None
    """Measured peak: parameters, gradients, optimizer state, rounding buffers and the working memory of a step."""

    host_bytes: int | None = None
    """Host memory for swapped activations."""

    device_limit_bytes: int | None = None
    host_limit_bytes: int | None = None
    alpha: float | None = None
    """Fraction of the tokens whose activations were swapped, or None if nothing was swapped or recomputed."""

    step_seconds: float | None = None


class LengthSearch:
    """Searches for the longest length that fits, assuming that longer sequences need more memory.

    The first two attempts, at short lengths, show how memory grows. The next attempt is at the length predicted to fill
    the memory. Later predictions use the two longest lengths that fit. Every other attempt bisects the remaining range,
    or doubles the length, so that wrong predictions cost at most twice the attempts of bisection.

    Args:
        low: Shortest length of interest, in tokens.
        high: Longest length of interest, in tokens.
        multiple_of: Only multiples of this number are tried.
        attempts: Earlier attempts with the same settings. Those at other lengths than the ones searched are ignored.

    Raises:
        ValueError: No multiple lies between `low` and `high`, or a number is not positive.
    """

    def __init__(self, low: int, high: int, multiple_of: int, attempts: Iterable[Attempt] = ()) -> None:
        for name, value in (("low", low), ("high", high), ("multiple_of", multiple_of)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not a number of tokens: give an integer of at least 1")
        if high < low:
            raise ValueError(f"high={high} is below low={low}: give the shortest length of interest as low")
        self.low, self.high = -(-low // multiple_of) * multiple_of, high // multiple_of * multiple_of
        if self.high < self.low:
            raise ValueError(
                f"no multiple of {multiple_of} lies between low={low} and high={high}: give a smaller multiple_of"
            )
        self.multiple_of = multiple_of
        lengths = range(self.low, self.high + 1, multiple_of)
        self.attempts = [attempt for attempt in attempts if attempt.tokens in lengths]

    @property
    def longest(self) -> Attempt | None:
        """The attempt at the longest length that has fit so far, or None."""
        return max((a for a in self.attempts if a.fits), key=lambda attempt: attempt.tokens, default=None)

    def add(self, attempt: Attempt) -> None:
        """Adds the result of an attempt."""
        self.attempts.append(attempt)

    def next_tokens(self) -> int | None:
        """Returns the length to try next, or None when the search is finished."""
        longest = self.longest
        if longest is None:
            return None if any(attempt.tokens == self.low for attempt in self.attempts) else self.low
        least = longest.tokens + self.multiple_of
        failed = min((a.tokens for a in self.attempts if not a.fits), default=self.high + self.multiple_of)
        most = failed - self.multiple_of
        if least > most:
            return None
        return min(max(self._proposed(longest.tokens, failed), least), most)

    def _proposed(self, longest: int, failed: int) -> int:
        count = len(self.attempts)
        if count == 2 or count % 2 == 1 < count:
            return self._predicted()
        return self._down((longest + failed) // 2 if failed <= self.high else 2 * longest)

    def _predicted(self) -> int:
        """The length at which planned memory would reach its limit if it grew linearly."""
        fitting = sorted((a for a in self.attempts if a.fits), key=lambda attempt: attempt.tokens)
        shorter, longer = fitting[max(len(fitting) - 2, 0)], fitting[-1]
        lengths = []
        for needs, limit in (
            ((shorter.planned_device_bytes, longer.planned_device_bytes), longer.device_limit_bytes),
            ((shorter.host_bytes, longer.host_bytes), longer.host_limit_bytes),
        ):
            lengths.append(_length_at((shorter.tokens, longer.tokens), needs, limit))
        return self._down(min([length for length in lengths if length is not None], default=self.high))

    def _down(self, tokens: int) -> int:
        return tokens // self.multiple_of * self.multiple_of


def _length_at(tokens: Sequence[int], needs: Sequence[int | None], limit: int | None) -> int | None:
    """The length at which a line through two points reaches a limit, or None if it never does or a value is unknown."""
    first, second = needs
    if first is None or second is None or limit is None or second <= first:
        return None
    return tokens[1] + (limit - second) * (tokens[1] - tokens[0]) // (second - first)
