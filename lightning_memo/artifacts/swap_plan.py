"""Where the tensors of layer calls wait for the backward, and how the layers run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from typing import Final, Literal

from lightning_memo.artifacts.costs import (
    ATTENTION,
    INPUT,
    MOVED,
    OTHER,
    PLACES,
    CallCosts,
    LayerCosts,
    Place,
    is_product,
    resident_calls,
)
from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.artifacts.slot_layouts import DiskLayout, whole_blocks


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

    def stored_bytes(self, call: CallCosts, tokens: int, *places: Place) -> int:
        """Return the bytes that a layer call stores in some places, without alignment.

        The bytes of each kind and place are rounded up.

        Args:
            call: Costs of the call.
            tokens: Tokens of the call.
            places: The places.
        """
        return sum(
            -(-size * self.tokens(kind, place) // tokens)
            for place in places
            for kind, size in zip(call.kinds, call.sizes, strict=True)
        )

    @property
    def bounds(self) -> tuple[int, ...]:
        """Tokens at which ranges begin or end, which are the bounds of the layer's slices."""
        return tuple(sorted({bound for r in self.ranges for bound in (r.start, r.stop)}))


@dataclass(frozen=True, kw_only=True)  # without slots, for properties that are computed once
class StoragePlan:
    """Where the tensors of every layer call are stored.

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

    segment_calls: int | None = None
    """Number of consecutive layer calls that form a segment, counted from the last call. Only the last segment stores
    tensors in the forward. Each other one stores the input of its first call, and runs again, as a whole, when its
    backward begins. None if all calls are one segment."""

    def __post_init__(self) -> None:
        check_range(self, {"tokens": 1, "slice_tokens": 1, "segment_calls": 1})
        if not self.call_classes or not set(self.call_classes) <= set(range(len(self.calls))):
            raise ValueError(
                f"call_classes must have a class for each layer call, of the {len(self.calls)} that calls describes"
            )
        for call in self.calls:
            if max(call.bounds, default=0) > self.tokens:
                raise ValueError(f"a range ends at token {max(call.bounds)}, after the {self.tokens} of a layer call")

    def call(self, number: int) -> CallPlan:
        """Plan of a layer call, given its position among the layer calls that are alive."""
        return self.calls[self.call_classes[number % len(self.call_classes)]]

    @property
    def segments(self) -> list[range]:
        """The layer calls of each segment, in execution order."""
        calls = len(self.call_classes)
        size = self.segment_calls or calls
        return [range(max(stop - size, 0), stop) for stop in range(calls, 0, -size)][::-1]

    def segments_behind(self, number: int) -> int:
        """Number of segments behind that of a layer call. It runs again in the backward if there are any."""
        return max(len(self.call_classes) - 1 - number, 0) // self.segment_calls if self.segment_calls else 0

    @property
    def calls_again(self) -> int:
        """Number of layer calls, the first ones, that run again in the backward."""
        return self.segments[-1].start

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
        kinds = (INPUT, ATTENTION, OTHER)
        return all(call.tokens(kind, "device") == self.tokens for call in self.calls for kind in kinds)

    @cached_property
    def stores_attention(self) -> bool:
        """Whether attention outputs of all tokens are stored."""
        return all(call.tokens(ATTENTION) == self.tokens for call in self.calls)

    @cached_property
    def has_one_alpha(self) -> bool:
        """Whether it swaps inputs, attention outputs and all tensors of the first tokens, and nothing else."""
        return all(
            call.tokens(INPUT, *MOVED) == call.tokens(ATTENTION, *MOVED) == self.tokens
            and all(r.place in MOVED and (r.kind != OTHER or r.start == 0) for r in call.ranges)
            and not any(is_product(r.kind) for r in call.ranges)
            for call in self.calls
        )

    def recomputed_bytes(self, other_bytes: Sequence[int]) -> int:
        """Largest number of bytes that the backward of a slice computes again.

        Args:
            other_bytes: For each layer call, bytes of all tensors of the kind "other".
        """
        most = 0
        for number, size in set(zip(cycle(self.call_classes), other_bytes, strict=False)):
            again = self.tokens - self.calls[number].tokens(OTHER)
            most = max(most, -(-size * min(again, self.slice_tokens or again) // self.tokens))
        return most


MOST_CALLS: Final = 2**16
StreamFromHost = Literal["none", "attention", "hidden", "model"]
Attention = Literal["sdpa", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_4", "transformer_engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMemory:
    """Bytes that a plan needs in addition to the model state and the transients of a step, alignment included."""

    slot: int = 0
    """Bytes of a rounding buffer: the most that one layer call stores on host and disk; one slice, if
    `stream_from_host` is not "none"."""

    host: int = 0
    """Host bytes of all layer calls, without the bounce buffers of the disk."""

    disk: tuple[int, ...] = ()
    """Disk bytes of each layer call, if it leaves the device; empty if none uses the disk."""

    kept: int = 0
    """Device bytes of all layer calls outside of the rounding buffers."""

    gradients: int = 0
    """Part of `host` for gradients of keys and values."""

    states: int = 0
    """Part of `host` for hidden states between layers, and for their gradients."""

    staging: int = 0
    """Device bytes of the buffers into which keys and values are fetched."""

    def __post_init__(self) -> None:
        check_range(self, {})

    @property
    def buffer_bytes(self) -> int:
        """Device bytes of the two rounding buffers and of the buffers for fetched keys and values."""
        return 2 * self.slot + self.staging


@dataclass(frozen=True, kw_only=True)  # without slots, for properties that are computed once
class SwapPlan:
    """Where activations wait for the backward, and how the layers run.

    Raises:
        ValueError: A count is negative, or there are more than 65,536 layer calls.
    """

    storage: StoragePlan
    memory: PlanMemory

    stream_from_host: StreamFromHost = "none"
    """Tensors that live on the host in addition to the swapped activations. With "attention", each slice swaps into its
    own slot, and the keys and values of earlier slices are fetched for it. With "hidden", the gradients of keys and
    values and the hidden states between layers live on the host, too. With "model", all layers run on one slice after
    the other, and only that slice is on the device."""

    joint_attention: bool = False
    """Whether attention of a layer runs over all of its slices at once."""

    in_flight: int | None = None
    """On a stage of a pipeline, number of micro-batches that the layer calls belong to; None without a pipeline."""

    attention: Attention = "sdpa"
    """Attention kernel of the layers, unless they train plainly."""

    def __post_init__(self) -> None:
        check_range(self, {"in_flight": 1})
        if self.calls > MOST_CALLS:  # sizes are sums over the calls
            raise ValueError(f"storage.call_classes has {self.calls} layer calls, and must have at most {MOST_CALLS}")
        if len(self.memory.disk) not in (0, self.calls):
            raise ValueError(f"memory.disk must have an entry for each of the {self.calls} layer calls, or none")
        if self.streamed and self.disk_calls:
            raise ValueError("memory.disk must be empty if stream_from_host is not none: slots of slices use no disk")
        if self.storage.calls_again and (self.stream_from_host != "hidden" or self.alpha):
            raise ValueError("storage.segment_calls must be null unless stream_from_host is hidden and alpha is 0")

    @property
    def calls(self) -> int:
        """Number of layer calls alive at once: n, or 2n if two forwards precede one backward."""
        return len(self.storage.call_classes)

    @property
    def plain(self) -> bool:
        """Whether nothing is swapped or recomputed."""
        return self.storage.keeps_all

    @property
    def alpha(self) -> float:
        """Fraction of the tokens of all layer calls whose tensors are all swapped."""
        return self.storage.share(OTHER, *MOVED)

    @property
    def recomputed(self) -> float:
        """Fraction of the tokens of all layer calls of which tensors are computed again."""
        return 1.0 - self.storage.share(OTHER)

    @property
    def streamed(self) -> bool:
        """Whether each slice swaps into its own slot, and keys and values of earlier slices come from the host."""
        return self.stream_from_host != "none"

    @property
    def gradients_on_host(self) -> bool:
        """Whether the gradients of keys and values are on the host, too."""
        return self.stream_from_host in ("hidden", "model")

    @cached_property
    def swapped_calls(self) -> int:
        """Number of layer calls whose activations leave the device.

        All do if streamed, or if several micro-batches are in flight; otherwise all but the last two.
        """
        if self.plain:
            return 0
        return self.calls if self.streamed else self.calls - resident_calls(self.calls, self.in_flight)

    @cached_property
    def disk_calls(self) -> tuple[int, ...]:
        """The layer calls that use the disk."""
        return tuple(call for call in range(self.swapped_calls) if self.slot_disk_bytes(call))

    def slot_disk_bytes(self, call: int) -> int:
        """Bytes of a layer call's slot that go to the disk."""
        return self.memory.disk[call % self.calls] if self.memory.disk else 0

    @property
    def host_bytes(self) -> int:
        """Host bytes for swapped activations: slots, and the bounce buffers of the disk."""
        return self.memory.host + self.disk_layout.bounce_bytes

    @property
    def disk_layout(self) -> DiskLayout:
        """Layout of the largest spilled slot."""
        return DiskLayout(max(map(self.slot_disk_bytes, range(self.swapped_calls)), default=0))

    @property
    def disk_bytes(self) -> int:
        """Disk bytes of all layer calls."""
        return sum(whole_blocks(self.slot_disk_bytes(call)) for call in range(self.swapped_calls))


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTrial:
    """Result of timing an attention kernel on calls like those of the model."""

    name: Attention

    seconds: float | None = None
    """Seconds of forward and backward on the slowest process; None if not measured."""

    why_not: str = ""
    """Why the kernel cannot be used, in one line; empty if it can."""

    def __post_init__(self) -> None:
        check_range(self, {})


def step_device_bytes(costs: LayerCosts, storage: StoragePlan, memory: PlanMemory) -> int:
    """Return the device bytes of a step, without the model state: transients, buffers and kept activations.

    Args:
        costs: Bytes of the layer calls.
        storage: Where they store their tensors.
        memory: The memory of the plan.
    """
    calls = len(storage.call_classes)
    recomputed = storage.recomputed_bytes([costs.other_bytes[n % costs.calls] for n in range(calls)])
    return costs.working_bytes_with(recomputed) + memory.buffer_bytes + memory.kept
