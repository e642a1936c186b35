"""Where each kind of tensor of a layer call is stored for the backward, in which ranges of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.tensor_kind_costs import ALL, ATTENTION, INPUT, PLACES, Place

# Later slices attend to the keys and values of recomputed ones, and continue the states of all.
_ALPHA_KINDS: Final = {INPUT, ATTENTION, ALL, "key", "value", "state"}
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
class NvmeTier:
    """Disk space for activations. Spilled activations also pass over the link between device and host."""

    capacity_bytes: int
    write_bytes_per_second: float
    read_bytes_per_second: float
    bounce_share: float = 0.0
    """Host bytes of the bounce buffers per byte of the largest amount that a layer call spills."""

    def __post_init__(self) -> None:
        check_range(self, {})
        for name in ("write_bytes_per_second", "read_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be greater than 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageBudget(Budget):
    """Memory that one process may use: all its device bytes, and host and NVMe bytes for activations."""

    nvme: NvmeTier | None = None

    @classmethod
    def of(cls, budget: Budget, costs: LayerCosts) -> StorageBudget:
        """Add the measured bandwidths of the disk to a budget.

        Args:
            budget: Capacities; without `spill_bytes` there is no disk.
            costs: Has the bandwidths of the disk.
        """
        nvme = None
        if budget.spill_bytes:
            nvme = NvmeTier(
                capacity_bytes=budget.spill_bytes,
                write_bytes_per_second=costs.spill_write_bytes_per_second,
                read_bytes_per_second=costs.spill_read_bytes_per_second,
            )
        return cls(
            device_bytes=budget.device_bytes, host_bytes=budget.host_bytes, spill_bytes=budget.spill_bytes, nvme=nvme
        )

    @property
    def capacities(self) -> Budget:
        """The budget without the bandwidths of the disk."""
        return Budget(device_bytes=self.device_bytes, host_bytes=self.host_bytes, spill_bytes=self.spill_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRange:
    """Tokens [start, stop) of one kind of tensor, and where they are stored."""

    kind: str
    place: Place
    start: int
    stop: int

    def __post_init__(self) -> None:
        check_range(self, {})
        if self.start > self.stop:
            raise ValueError(f"start={self.start} must be at most stop={self.stop}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallPlan:
    """Tensors that the layer calls of one class store. What no range names is computed again."""

    ranges: tuple[StoredRange, ...]

    def tokens(self, kind: str, *places: Place) -> int:
        """Number of tokens for which a kind of tensor is stored.

        Args:
            kind: Kind of tensor.
            places: Places that count; all if none is given.
        """
        return sum(r.stop - r.start for r in self.ranges if r.kind == kind and r.place in (places or PLACES))

    @property
    def bounds(self) -> tuple[int, ...]:
        """Tokens at which ranges begin or end, which are the bounds of the layer's slices."""
        return tuple(sorted({bound for r in self.ranges for bound in (r.start, r.stop)}))


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Marginal value of a resource: a dual variable of the linear program."""

    resource: Resource
    limit: float
    """Available amount in bytes, or bytes per second."""

    seconds: float
    """Seconds by which the step becomes shorter per additional byte, or byte per second."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageNeeds:
    """Time and memory that a step needs."""

    step_seconds: float
    """Expected seconds: for each layer call the longer of its copies and the next call's computation. If all layer
    calls are equal, this is MEMO's time of a step (section 4.2)."""

    device_bytes: int
    """All device bytes of the process."""

    rounding_bytes: int
    """Part of `device_bytes` for the two rounding buffers."""

    host_bytes: int
    nvme_bytes: int

    def __post_init__(self) -> None:
        check_range(self, {})

    def fits(self, budget: StorageBudget) -> bool:
        """Whether no memory needs more than its budget."""
        nvme_bytes = budget.nvme.capacity_bytes if budget.nvme else 0
        on_host = self.host_bytes <= budget.host_bytes and self.nvme_bytes <= nvme_bytes
        return on_host and self.device_bytes <= budget.device_bytes


NO_NEEDS: Final = StorageNeeds(step_seconds=0.0, device_bytes=0, rounding_bytes=0, host_bytes=0, nvme_bytes=0)
"""Needs of a plan whose time and memory are not known, or do not matter."""


@dataclass(frozen=True, kw_only=True)  # without slots, for properties that are computed once
class StoragePlan:
    """Where the tensors of every layer call are stored, and the expected time and memory.

    Every way to train is such a plan. Plain training keeps all tensors of all tokens. MEMO's alpha (section 4.1) swaps
    all tensors of the first tokens, and the inputs and attention outputs of the others. Layers that cannot be cut are
    of two classes, swapped and recomputed. A profiled step recomputes all tokens.
    """

    tokens: int
    """Tokens of a layer call."""

    call_classes: tuple[int, ...]
    """Index into `calls` of each layer call, in execution order."""

    calls: tuple[CallPlan, ...]
    """Plan of each class of layer calls."""

    slice_tokens: int | None = None
    """Maximum number of tokens that run through a layer at once; None for no limit."""

    needs: StorageNeeds = NO_NEEDS
    bound_seconds: float = 0.0
    """Lower bound of the step time, reached with arbitrary fractions of the tokens."""

    alpha_seconds: float | None = None
    """Step time of the best single alpha, as in MEMO; None if no alpha fits."""

    prices: tuple[Price, ...] = ()

    def __post_init__(self) -> None:
        check_range(self, {"tokens": 1, "slice_tokens": 1})
        if not self.call_classes or not set(self.call_classes) <= set(range(len(self.calls))):
            raise ValueError(
                f"call_classes must have a class for each layer call, of the {len(self.calls)} that calls describes"
            )
        for call in self.calls:
            if max(call.bounds, default=0) > self.tokens:
                raise ValueError(f"a range ends at token {max(call.bounds)}, after the {self.tokens} of a layer call")

    @property
    def executed(self) -> StoragePlan:
        """The plan without measured and expected numbers, to compare what is executed."""
        return replace(self, needs=NO_NEEDS, bound_seconds=0.0, alpha_seconds=None, prices=())

    def call(self, number: int) -> CallPlan:
        """Plan of a layer call, given its position among the layer calls that are alive."""
        return self.calls[self.call_classes[number % len(self.call_classes)]]

    def share(self, kind: str, *places: Place) -> float:
        """Fraction of the tokens for which a kind of tensor is stored, over all layer calls.

        Args:
            kind: Kind of tensor.
            places: Places that count; all if none is given.
        """
        stored = sum(self.calls[number].tokens(kind, *places) for number in self.call_classes)
        return stored / (self.tokens * len(self.call_classes))

    @cached_property
    def keeps_all(self) -> bool:
        """Whether all tensors stay on the device, as in plain training."""
        return all(call.tokens(ALL, "keep") == self.tokens for call in self.calls)

    @cached_property
    def stores_attention(self) -> bool:
        """Whether attention outputs of all tokens are stored."""
        return all(call.tokens(ATTENTION) == self.tokens for call in self.calls)

    @cached_property
    def has_one_alpha(self) -> bool:
        """Whether it swaps inputs, attention outputs and all tensors of the first tokens, and nothing else."""
        return all(
            call.tokens(INPUT, "swap", "spill") == call.tokens(ATTENTION, "swap", "spill") == self.tokens
            and all(r.place != "keep" and (r.kind != ALL or r.start == 0) for r in call.ranges)
            and {r.kind for r in call.ranges} <= _ALPHA_KINDS
            for call in self.calls
        )

    def recomputed_bytes(self, other_bytes: Sequence[int]) -> int:
        """Largest number of bytes that the backward of a slice computes again.

        Args:
            other_bytes: For each layer call, bytes of all tensors of the kind "all".
        """
        most = 0
        for number, size in enumerate(other_bytes):
            again = self.tokens - self.call(number).tokens(ALL)
            most = max(most, -(-size * min(again, self.slice_tokens or again) // self.tokens))
        return most
