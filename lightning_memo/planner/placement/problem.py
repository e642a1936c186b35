"""What is to be placed, and where it was placed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_memo.utils.arrays import Integers

MAX_BYTES = 2**61
"""Most bytes that buffers may have together: no sum of an offset and a size overflows 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Buffers with lifetimes, to be given offsets such that no two that live at once overlap.

    A buffer lives in `[lower, upper)`. With a `period`, time goes round, as training steps do: a buffer with
    `upper <= lower` lives over the end of a step, in `[lower, period)` and `[0, upper)` of the next.

    Raises:
        ValueError: arrays of different lengths, a negative size, a lifetime that is empty or outside the period, an
            alignment below 1, or more than 2^61 bytes.
    """

    lower: Integers
    """[buffers] Time of birth."""

    upper: Integers
    """[buffers] Time of death."""

    size: Integers
    """[buffers] Bytes."""

    alignment: int = 1
    """Offsets are multiples of this many bytes."""

    period: int | None = None
    """Length of a step, in the unit of `lower`; None: time does not go round."""

    def __post_init__(self) -> None:
        if not len(self.lower) == len(self.upper) == len(self.size):
            raise ValueError(
                f"{len(self.lower)} births, {len(self.upper)} deaths and {len(self.size)} sizes: give one of each for "
                "every buffer"
            )
        if not 1 <= self.alignment <= MAX_BYTES:
            raise ValueError(f"alignment={self.alignment}: give bytes, from 1 to {MAX_BYTES}")
        self._refuse(self.size < 0, "size", "sizes are at least 0")
        if self.period is None:
            self._refuse(self.upper <= self.lower, "upper", "a buffer dies after it is born")
        else:
            self._refuse((self.lower < 0) | (self.lower >= self.period), "lower", f"times are in [0, {self.period})")
            self._refuse((self.upper < 0) | (self.upper > self.period), "upper", f"times are in [0, {self.period}]")
        # In Python's integers: neither the sum nor what is added need fit 64 bits.
        if sum(-(-size // self.alignment) * self.alignment for size in self.size.tolist()) > MAX_BYTES:
            raise ValueError(f"all sizes together are above {MAX_BYTES} bytes: give at most that")

    def _refuse(self, wrong: npt.NDArray[np.bool_], name: str, rule: str) -> None:
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ValueError(f"buffer {first}: {name}={int(getattr(self, name)[first])}, but {rule}")

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def padded_size(self) -> Integers:
        """[buffers] Bytes up to the next multiple of the alignment."""
        return -(-self.size // self.alignment) * self.alignment

    @cached_property
    def wraps(self) -> npt.NDArray[np.bool_]:
        """[buffers] Whether the buffer lives over the end of a step."""
        return self.upper <= self.lower

    @cached_property
    def lower_bound_bytes(self) -> int:
        """The largest live load: no placement has a lower peak."""
        return int(self.load[1].max(initial=0))

    @cached_property
    def load(self) -> tuple[Integers, Integers]:
        """Times at which the live load changes, ascending, and the live bytes from each on."""
        birth = np.concatenate([self.lower, np.zeros(int(self.wraps.sum()), np.int64)])
        size = np.concatenate([self.padded_size, self.padded_size[self.wraps]])
        change = np.concatenate([size, -self.padded_size])
        times, where = np.unique(np.concatenate([birth, self.upper]), return_inverse=True)
        steps = np.zeros(len(times), np.int64)
        np.add.at(steps, where, change)
        return times, np.cumsum(steps)

    def subset(self, buffers: Integers) -> Problem:
        """The problem of some buffers only."""
        return Problem(
            lower=self.lower[buffers],
            upper=self.upper[buffers],
            size=self.size[buffers],
            alignment=self.alignment,
            period=self.period,
        )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Offsets for the buffers of a problem."""

    offset: Integers = field(repr=False)
    """[buffers] Bytes from the start of the arena."""

    peak_bytes: int
    """Where the highest buffer ends, up to the next multiple of the alignment: the size of the arena."""

    lower_bound_bytes: int
    """No placement has a lower peak: the largest live load, or what a search has proven."""

    method: str
    """What found it."""

    seconds: float
    """How long it took."""

    @property
    def optimal(self) -> bool:
        """Whether no other placement has a lower peak, as far as is proven."""
        return self.peak_bytes == self.lower_bound_bytes

    @property
    def gap(self) -> float:
        """Peak over lower bound, less 1."""
        return self.peak_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0


def peak_bytes(problem: Problem, offset: Integers) -> int:
    """Where the highest buffer ends, up to the next multiple of the alignment."""
    return int((offset + problem.padded_size).max(initial=0))
