"""What layer calls store for their backward, and where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.artifacts.storage_budget import StorageBudget
from lightning_memo.artifacts.tensor_kind_costs import PLACES, Place

Resource = Literal[
    "device memory",
    "host memory",
    "NVMe space",
    "offload bandwidth",
    "prefetch bandwidth",
    "NVMe write bandwidth",
    "NVMe read bandwidth",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRange:
    """Tokens [start, stop) of one kind, and their place."""

    kind: str
    place: Place
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPlan:
    """What the layer calls of one class store."""

    ranges: tuple[StoredRange, ...]

    def tokens(self, kind: str, *places: Place) -> int:
        """Tokens of a kind in the given places; without places, in any."""
        return sum(r.stop - r.start for r in self.ranges if r.kind == kind and r.place in (places or PLACES))

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where ranges begin and end: the bounds of the slices that the layer runs in."""
        return tuple(sorted({bound for r in self.ranges for bound in (r.start, r.stop)}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """What a little more of a resource is worth: a dual of the linear program."""

    resource: Resource
    limit: float
    """How much there is: bytes, or bytes per second."""

    seconds: float
    """Seconds that the step gets shorter for each byte, or byte per second, more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageNeeds:
    """What a step takes and needs."""

    step_seconds: float
    """Expected: each call's copies or the next call's compute, whichever takes longer. Where all layer calls are alike,
    that is MEMO's time of a step (section 4.2)."""

    device_bytes: int
    """All that the process needs on the device."""

    rounding_bytes: int
    """Of these, the two rounding buffers."""

    host_bytes: int
    nvme_bytes: int

    def __post_init__(self) -> None:
        check_range(self, {})

    def fits(self, budget: StorageBudget) -> bool:
        """Whether every memory holds what is needed of it."""
        nvme_bytes = budget.nvme.capacity_bytes if budget.nvme else 0
        on_host = self.host_bytes <= budget.host_bytes and self.nvme_bytes <= nvme_bytes
        return on_host and self.device_bytes <= budget.device_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StoragePlan:
    """What every layer call stores and where, and what that costs."""

    tokens: int
    """Of a layer call."""

    call_classes: tuple[int, ...]
    """For each layer call, in the order of execution, its place in `calls`."""

    calls: tuple[CallPlan, ...]
    """One for each class of layer calls."""

    needs: StorageNeeds
    bound_seconds: float
    """No fractions of tokens would give a shorter step."""

    alpha_seconds: float | None
    """The same if layer calls swapped a fraction of the tokens whole and recomputed the rest, as MEMO does; None if no
    fraction fits."""

    prices: tuple[Price, ...]

    def __post_init__(self) -> None:
        check_range(self, {"tokens": 1})

    @property
    def executed(self) -> StoragePlan:
        """What is done, without what was measured and expected."""
        nothing = StorageNeeds(step_seconds=0.0, device_bytes=0, rounding_bytes=0, host_bytes=0, nvme_bytes=0)
        return replace(self, needs=nothing, bound_seconds=0.0, alpha_seconds=None, prices=())

    def share(self, kind: str, *places: Place) -> float:
        """Fraction of the tokens of a kind that have one of some places (without places, any), over all layer calls."""
        stored = sum(self.calls[number].tokens(kind, *places) for number in self.call_classes)
        return stored / (self.tokens * len(self.call_classes))
