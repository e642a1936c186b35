"""The placement problem and its solution."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from lightning_memo.utils.array_types import Integers

MAX_BYTES = 2**61
"""Maximum total size of all buffers, so that no sum of an offset and a size overflows 64 bits."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Buffers with lifetimes that need offsets such that no two buffers overlap while both are alive.

    A buffer lives in `[lower, upper)`. With a `period`, time is cyclic, like training steps: a buffer with
    `upper <= lower` lives across the end of a step, in `[lower, period)` and in `[0, upper)` of the next step.

    Raises:
        ValueError: The arrays differ in length, a size is negative, a lifetime is empty or outside the period, the
            alignment is below 1, or the sizes sum to more than 2^61 bytes.
    """

    lower: Integers
    """[buffers] Time of birth."""

    upper: Integers
    """[buffers] Time of death."""

    size: Integers
    """[buffers] Size in bytes."""

    alignment: int = 1
    """Offsets are multiples of this many bytes."""

    period: int | None = None
    """Length of a step in the unit of `lower`; None if time is not cyclic."""

    def __post_init__(self) -> None:
        if not len(self.lower) == len(self.upper) == len(self.size):
            raise ValueError(
                f"{len(self.lower)} births, {len(self.upper)} deaths and {len(self.size)} sizes: every "
                "buffer needs one of each"
            )
        if not 1 <= self.alignment <= MAX_BYTES:
            raise ValueError(f"alignment={self.alignment} must be from 1 to {MAX_BYTES} bytes")
        self._refuse(self.size < 0, "size", "sizes must be at least 0")
        if self.period is None:
            self._refuse(self.upper <= self.lower, "upper", "a buffer must die after its birth")
        else:
            self._refuse(
                (self.lower < 0) | (self.lower >= self.period), "lower", f"births must be in [0, {self.period})"
            )
            self._refuse(
                (self.upper < 0) | (self.upper > self.period), "upper", f"deaths must be in [0, {self.period}]"
            )
        # Python integers, because neither the sum nor its terms have to fit 64 bits.
        if sum(-(-size // self.alignment) * self.alignment for size in self.size.tolist()) > MAX_BYTES:
            raise ValueError(f"the sizes sum to more than {MAX_BYTES} bytes, which is the maximum")

    def _refuse(self, wrong: npt.NDArray[np.bool_], name: str, rule: str) -> None:
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ValueError(f"buffer {first}: {name}={int(getattr(self, name)[first])}, but {rule}")

    def __len__(self) -> int:
        return len(self.size)

    @cached_property
    def padded_size(self) -> Integers:
        """[buffers] Size rounded up to the alignment."""
        return -(-self.size // self.alignment) * self.alignment

    @cached_property
    def wraps(self) -> npt.NDArray[np.bool_]:
        """[buffers] Whether the buffer lives across the end of a step."""
        return self.upper <= self.lower

    @cached_property
    def lower_bound_bytes(self) -> int:
        """Largest number of bytes alive at the same time, below which no peak can be."""
        return int(self.load[1].max(initial=0))

    @cached_property
    def load(self) -> tuple[Integers, Integers]:
        """Ascending times at which the live bytes change, and the live bytes from each time on."""
        birth = np.concatenate([self.lower, np.zeros(int(self.wraps.sum()), np.int64)])
        size = np.concatenate([self.padded_size, self.padded_size[self.wraps]])
        change = np.concatenate([size, -self.padded_size])
        times, where = np.unique(np.concatenate([birth, self.upper]), return_inverse=True)
        steps = np.zeros(len(times), np.int64)
        np.add.at(steps, where, change)
        return times, np.cumsum(steps)

    def subset(self, buffers: Integers) -> Problem:
        """The problem with only some of the buffers.

        Args:
            buffers: Indices of the buffers.
        """
        return Problem(
            lower=self.lower[buffers],
            upper=self.upper[buffers],
            size=self.size[buffers],
            alignment=self.alignment,
            period=self.period,
        )


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Offsets of the buffers of a problem."""

    offset: Integers = field(repr=False)
    """[buffers] Offset from the start of the arena in bytes."""

    peak_bytes: int
    """Size of the arena: the end of the highest buffer, rounded up to the alignment."""

    lower_bound_bytes: int
    """Lower bound of the peak of any placement: the largest live bytes, or a higher bound that a search has proven."""

    method: str
    """Algorithm that found the placement."""

    seconds: float
    """Seconds that the solver took."""

    @property
    def optimal(self) -> bool:
        """Whether the peak is proven to be minimal."""
        return self.peak_bytes == self.lower_bound_bytes

    @property
    def gap(self) -> float:
        """Relative distance of the peak from the lower bound."""
        return self.peak_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0


def peak_bytes(problem: Problem, offset: Integers) -> int:
    """End of the highest buffer, rounded up to the alignment.

    Args:
        problem: The buffers.
        offset: [buffers] Offset of each buffer.
    """
    return int((offset + problem.padded_size).max(initial=0))
