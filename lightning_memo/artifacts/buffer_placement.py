"""Offsets of a step's buffers in the arena (MEMO, section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memo.artifacts.json_documents import check_range


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePlacement:
    """The places of what one phase of a step requests, in order.

    Raises:
        ValueError: not one offset for each size, or a negative size.
    """

    name: str
    sizes: tuple[int, ...]
    """Bytes."""

    offsets: tuple[int, ...]
    """Bytes from the start of the arena; -1: the request is left to PyTorch's allocator."""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.offsets):
            raise ValueError(f"{len(self.sizes)} sizes and {len(self.offsets)} offsets: one of each is needed")
        if min(self.sizes, default=0) < 0 or min(self.offsets, default=0) < -1:
            raise ValueError("a size is below 0, or an offset below -1")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlacement:
    """A place for every buffer of a training step (MEMO, section 4.3).

    Raises:
        ValueError: a request ends above the peak, or a number is out of range.
    """

    phases: tuple[PhasePlacement, ...]
    peak_bytes: int
    """Size of the arena."""

    lower_bound_bytes: int
    """No placement has a lower peak."""

    min_bytes: int
    """Smaller requests are left to PyTorch's allocator."""

    threads: int
    """Threads that computed: scratch memory depends on them."""

    method: str
    """What found it."""

    seconds: float
    """How long that took."""

    def __post_init__(self) -> None:
        check_range(self, {"threads": 1})
        if not min(self.peak_bytes, self.requests) <= self.lower_bound_bytes <= self.peak_bytes:
            raise ValueError(
                f"lower_bound_bytes={self.lower_bound_bytes} must be from 1 to peak_bytes={self.peak_bytes}"
            )
        for phase in self.phases:
            for size, offset in zip(phase.sizes, phase.offsets, strict=True):
                if offset >= 0 and offset + size > self.peak_bytes:
                    raise ValueError(f"{phase.name}: {size} bytes at {offset} end above the peak of {self.peak_bytes}")

    @property
    def requests(self) -> int:
        """Requests that have a place."""
        return sum(offset >= 0 for phase in self.phases for offset in phase.offsets)
