"""Offsets of a step's buffers in the arena (MEMO, section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memo.artifacts.json_documents import check_range


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePlacement:
    """Offsets for the memory requests of one phase of a step, in the order of the requests.

    Raises:
        ValueError: The numbers of sizes and offsets differ, a size is negative, or an offset is below -1.
    """

    name: str
    sizes: tuple[int, ...]
    """Bytes of each request."""

    offsets: tuple[int, ...]
    """Offset of each request in the arena, in bytes; -1 if PyTorch's allocator serves it."""

    varying: tuple[int, ...] = ()
    """Sizes of which the recorded steps made different numbers of requests. Which of the recorded ones a request is, is
    not known from its size: it is served at its offset only directly after the request that was recorded before it."""

    occasional: tuple[int, ...] = ()
    """Sizes that some of the recorded steps did not request at all. These requests have no places of their own. They
    get free bytes of the arena."""

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.offsets):
            raise ValueError(f"{len(self.sizes)} sizes, but {len(self.offsets)} offsets: the numbers must be equal")
        if min(self.sizes, default=0) < 0 or min(self.offsets, default=0) < -1:
            raise ValueError("a size is below 0, or an offset below -1")

    @property
    def places(self) -> list[tuple[int, int, bool]]:
        """The requests that have a place of their own: size, offset, and whether the size varies."""
        varying, occasional = set(self.varying), set(self.occasional)
        pairs = zip(self.sizes, self.offsets, strict=True)
        return [(size, offset, size in varying) for size, offset in pairs if size not in occasional]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlacement:
    """Offsets for all buffers of a training step (MEMO, section 4.3).

    Raises:
        ValueError: A request ends above the peak, or a number is out of range.
    """

    phases: tuple[PhasePlacement, ...]
    peak_bytes: int
    """End of the highest buffer."""

    lower_bound_bytes: int
    """Proven lower bound of the peak of any placement."""

    min_bytes: int
    """PyTorch's allocator serves smaller requests."""

    threads: int
    """Number of CPU threads that computed; scratch memory depends on it."""

    method: str
    """Algorithm that found the placement."""

    seconds: float
    """Seconds that the solver took."""

    room_bytes: int = 0
    """Memory of the arena above the peak, for steps that need more than the recorded one."""

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
    def arena_bytes(self) -> int:
        """Size of the arena."""
        return self.peak_bytes + self.room_bytes

    @property
    def repeats(self) -> bool:
        """Whether all recorded steps made the same requests."""
        return not any(phase.varying or phase.occasional for phase in self.phases)

    @property
    def requests(self) -> int:
        """Number of requests that have an offset."""
        return sum(offset >= 0 for phase in self.phases for offset in phase.offsets)
