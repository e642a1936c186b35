"""Records buffers with lifetimes, in the order in which a program allocates and frees them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from lightning_memo.planner.placement import Problem


@dataclass(slots=True)
class Buffers:
    """Collects buffers. A buffer that is not freed lives until the end."""

    _size: list[int] = field(default_factory=list)
    _birth: list[int] = field(default_factory=list)
    _death: dict[int, int] = field(default_factory=dict)

    def make(self, size_bytes: int) -> int:
        """Allocates a buffer, and returns its number for `free`."""
        self._birth.append(len(self._birth))
        self._size.append(size_bytes)
        return len(self._size) - 1

    def free(self, *numbers: int) -> None:
        """Frees buffers, before the next one is allocated."""
        self._death.update(dict.fromkeys(numbers, len(self._birth)))

    @property
    def lower_bound_bytes(self) -> int:
        """Largest sum of live buffers, below which no placement has its peak. Training uses the same bound."""
        death = [self._death.get(number, len(self._birth)) for number in range(len(self._size))]
        problem = Problem(
            lower=np.array(self._birth, np.int64), upper=np.array(death, np.int64), size=np.array(self._size, np.int64)
        )
        return problem.lower_bound_bytes
