"""Which length to try next. Pure: what is known are the attempts so far, so that a search can go on at any time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """Training steps at one length, and how they ended. Bytes are `None` where the attempt did not come so far."""

    tokens: int
    fits: bool
    reason: str = ""
    """Why it does not fit, in one line."""

    planned_device_bytes: int | None = None
    peak_device_bytes: int | None = None
    """Measured: parameters, gradients, optimizer state, buffers, and what a step takes beside them."""

    host_bytes: int | None = None
    """Host memory for what is swapped."""

    device_limit_bytes: int | None = None
    host_limit_bytes: int | None = None
    alpha: float | None = None
    """Fraction of the tokens whose activations were swapped; `None`: nothing was swapped or recomputed."""

    step_seconds: float | None = None


class LengthSearch:
    """Searches the longest length that fits, among the multiples of a number; longer ones need more than shorter ones.

    Two short lengths tell how memory grows; the length that is predicted to fill it is tried next. The prediction is
    made anew from the two longest that fit, and every other attempt halves what is left, or doubles the length, so that
    a wrong prediction costs at most twice the attempts of bisection.

    Args:
        low: The least length of interest.
        high: The longest.
        multiple_of: What lengths are multiples of.
        attempts: Made before, with the same settings; those at lengths that are of no interest now are left out.

    Raises:
        ValueError: There is no such length, or a number is not positive.
    """

    def __init__(self, low: int, high: int, multiple_of: int, attempts: Iterable[Attempt] = ()) -> None:
        for name, value in (("low", low), ("high", high), ("multiple_of", multiple_of)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}={value!r} is not a number of tokens: give an integer of at least 1")
        if high < low:
            raise ValueError(f"high={high} is below low={low}: give the least length of interest as low")
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
        """The longest length that fitted so far."""
        return max((a for a in self.attempts if a.fits), key=lambda attempt: attempt.tokens, default=None)

    def add(self, attempt: Attempt) -> None:
        """Takes note of how an attempt ended."""
        self.attempts.append(attempt)

    def next_tokens(self) -> int | None:
        """The length to try next; `None` when the search is over."""
        longest = self.longest
        if longest is None:
            return None if any(attempt.tokens == self.low for attempt in self.attempts) else self.low
        least = longest.tokens + self.multiple_of
        failed = min((a.tokens for a in self.attempts if not a.fits), default=self.high + self.multiple_of)
        most = failed - self.multiple_of
        if least > most:
            return None
        return min(max(self._wish(longest.tokens, failed), least), most)

    def _wish(self, longest: int, failed: int) -> int:
        count = len(self.attempts)
        if count == 2 or count % 2 == 1 < count:
            return self._predicted()
        return self._down((longest + failed) // 2 if failed <= self.high else 2 * longest)

    def _predicted(self) -> int:
        """The length at which what is planned, taken to grow linearly, reaches a limit."""
        fitting = sorted((a for a in self.attempts if a.fits), key=lambda attempt: attempt.tokens)
        shorter, longer = fitting[max(len(fitting) - 2, 0)], fitting[-1]
        rooms = []
        for needs, limit in (
            ((shorter.planned_device_bytes, longer.planned_device_bytes), longer.device_limit_bytes),
            ((shorter.host_bytes, longer.host_bytes), longer.host_limit_bytes),
        ):
            rooms.append(_length_at((shorter.tokens, longer.tokens), needs, limit))
        return self._down(min([room for room in rooms if room is not None], default=self.high))

    def _down(self, tokens: int) -> int:
        return tokens // self.multiple_of * self.multiple_of


def _length_at(tokens: Sequence[int], needs: Sequence[int | None], limit: int | None) -> int | None:
    """Where a line through two points reaches a limit; `None` if it never does, or that is not known."""
    first, second = needs
    if first is None or second is None or limit is None or second <= first:
        return None
    return tokens[1] + (limit - second) * (tokens[1] - tokens[0]) // (second - first)
