"""The part of a plan that the engine executes: what is swapped, recomputed and kept, and the schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.artifacts.layer_costs import resident_calls
from lightning_memo.artifacts.slot_layouts import SpillLayout, SwapPrecision, whole_blocks
from lightning_memo.artifacts.storage_plan import StoragePlan

MOST_CALLS: Final = 2**16
HostBacked = Literal["none", "attention", "all"]
Schedule = Literal["layer", "nest", "slice"]
Attention = Literal["sdpa", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_4", "transformer_engine"]


@dataclass(frozen=True, slots=True)
class SlotSize:
    """Bytes of the slot of a layer call, and how many of these go to the disk."""

    total_bytes: int
    disk_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapPlan:
    """Which activations are swapped, and how the layers run.

    Raises:
        ValueError: alpha is outside 0 to 1, a count is negative, or there are more than 65,536 layer calls.
    """

    mode: Literal["memo", "plain"]
    """With "plain", nothing is swapped or recomputed."""

    alpha: float
    """Fraction of the tokens (with `whole_layers`, of the layer calls) whose skeletal activations are swapped; 0.0 with
    "plain"."""

    schedule: Schedule
    slice_tokens: int | None
    """Maximum number of tokens that run through a layer at once; None for no limit."""

    calls: int
    """Number of layer calls alive at once: n, or 2n if two forwards precede one backward."""

    slot_bytes: int
    """Bytes of a rounding buffer, which holds the swapped activations of one layer call (of one slice, if `host_backed`
    is not "none")."""

    host_backed: HostBacked = "none"
    """Tensors that live on the host in addition to the swapped activations. With "attention", each slice swaps into its
    own slot, and the keys and values of earlier slices are fetched for it. With "all", the gradients of keys and
    values and the hidden states between layers live on the host, too."""

    streamed_host_bytes: int = 0
    """Host bytes of all layer calls if `host_backed` is not "none"."""

    gradient_host_bytes: int = 0
    """Part of `streamed_host_bytes` for gradients of keys and values."""

    state_host_bytes: int = 0
    """Part of `streamed_host_bytes` for hidden states between layers, and for their gradients."""

    staging_bytes: int = 0
    """Device bytes of the buffers into which keys and values are fetched."""

    whole_layers: bool = False
    """Whether alpha is a fraction of the layer calls, which run as one slice each and are swapped or recomputed."""

    recomputed_slot_bytes: int = 0
    """Host bytes of a recomputed layer call with `whole_layers`."""

    storage: StoragePlan | None = None
    """Where each kind of tensor is stored; None if alpha alone decides. With a storage plan, alpha is the fraction of
    the tokens whose tensors are all swapped."""

    stored_host_bytes: int = 0
    """Host bytes of all layer calls with a storage plan, alignment included and bounce buffers excluded."""

    stored_spill_bytes: tuple[int, ...] = ()
    """Disk bytes of each layer call with a storage plan, alignment included; empty if none uses the disk."""

    kept_bytes: int = 0
    """Device bytes that all layer calls keep outside the rounding buffers with a storage plan."""

    spilled_calls: int = 0
    """Number of swapped layer calls whose activations go to a file on a disk instead of the host."""

    in_flight: int | None = None
    """On a stage of a pipeline, number of micro-batches that the layer calls belong to; None without a pipeline."""

    attention: Attention = "sdpa"
    """Attention kernel of the layers if the mode is "memo"."""

    precision: SwapPrecision = "exact"
    """How activations are swapped. With "fp8", sizes of slots are those of compressed tensors."""

    def __post_init__(self) -> None:
        check_range(self, {"calls": 1, "slice_tokens": 1, "in_flight": 1})
        if self.alpha > 1.0:
            raise ValueError(f"alpha={self.alpha!r} must be from 0.0 to 1.0")
        if self.calls > MOST_CALLS:  # sizes are sums over the calls
            raise ValueError(f"calls={self.calls} must be at most {MOST_CALLS}")
        if self.spilled_calls > (0 if self.streamed else self.swapped_calls):
            raise ValueError(f"spilled_calls={self.spilled_calls} must be at most the calls that are swapped whole")
        if self.whole_layers and (self.streamed or self.storage is not None or self.spilled_calls):
            raise ValueError("whole_layers contradicts host_backed, a storage plan and spilled_calls")
        if self.storage is not None and len(self.storage.call_classes) != self.calls:
            raise ValueError(
                f"storage.call_classes must have a class for each of the {self.calls} layer calls, but has "
                f"{len(self.storage.call_classes)}"
            )
        if len(self.stored_spill_bytes) not in (0, self.calls):
            raise ValueError(f"stored_spill_bytes must have an entry for each of the {self.calls} layer calls, or none")

    @property
    def streamed(self) -> bool:
        """Whether each slice swaps into its own slot, and keys and values of earlier slices come from the host."""
        return self.host_backed != "none"

    def alpha_of(self, call: int) -> float:
        """Fraction of a layer call's tokens whose skeletal activations are swapped."""
        if not self.whole_layers:
            return self.alpha
        return float(is_swapped(call % self.calls, self.alpha, self.calls))

    @property
    def least_alpha(self) -> float:
        """Smallest fraction of the tokens of a layer call whose skeletal activations are swapped."""
        return math.floor(self.alpha) if self.whole_layers else self.alpha

    @property
    def executed(self) -> SwapPlan:
        """The plan without measured and expected numbers, to compare what is executed."""
        return self if self.storage is None else replace(self, storage=self.storage.executed)

    @property
    def swapped_calls(self) -> int:
        """Number of layer calls whose activations leave the device.

        All do if streamed, or if several micro-batches are in flight; otherwise all but the last two.
        """
        if self.mode == "plain":
            return 0
        return self.calls if self.streamed else self.calls - resident_calls(self.calls, self.in_flight)

    @property
    def host_bytes(self) -> int:
        """Host bytes for swapped activations: slots, and the bounce buffers of the disk."""
        if self.streamed:
            return self.streamed_host_bytes
        if self.storage is not None:
            return self.stored_host_bytes + self.spill_layout.bounce_bytes
        slots = map(self.slot_size, range(self.swapped_calls))
        return sum(slot.total_bytes - slot.disk_bytes for slot in slots) + self.spill_layout.bounce_bytes

    @property
    def spill_layout(self) -> SpillLayout:
        """Layout of the largest spilled slot."""
        return SpillLayout(max(map(self.bytes_to_spill, range(self.swapped_calls)), default=0))

    @property
    def spill_bytes(self) -> int:
        """Disk bytes of all layer calls."""
        return sum(whole_blocks(self.bytes_to_spill(call)) for call in range(self.swapped_calls))

    def bytes_to_spill(self, call: int) -> int:
        """Bytes of a layer call's slot that go to the disk."""
        return self.slot_size(call).disk_bytes

    def slot_size(self, call: int) -> SlotSize:
        """Size of a layer call's slot."""
        if self.storage is not None:
            disk_bytes = self.stored_spill_bytes[call % self.calls] if self.stored_spill_bytes else 0
            return SlotSize(self.slot_bytes, disk_bytes)
        if self.whole_layers and not self.alpha_of(call):
            return SlotSize(self.recomputed_slot_bytes)
        return SlotSize(self.slot_bytes, self.slot_bytes if self.spills(call) else 0)

    def spills(self, call: int) -> bool:
        """Whether a whole layer call is spilled. Spilled calls are evenly spaced because the disk is slower."""
        return call < self.swapped_calls and _is_spread(call, self.spilled_calls, self.swapped_calls)

    @property
    def buffer_bytes(self) -> int:
        """Device bytes of the two rounding buffers and of the buffers for fetched keys and values."""
        return 2 * self.slot_bytes + self.staging_bytes


def is_swapped(call: int, alpha: float, calls: int) -> bool:
    """Return whether a layer call is swapped if alpha is the fraction of those that are swapped as a whole."""
    return _is_spread(call, round(alpha * calls), calls)


def _is_spread(call: int, chosen: int, calls: int) -> bool:
    """Return whether a call is among the `chosen` of `calls` that are evenly spaced."""
    return call * chosen % calls < chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceBytes:
    """A slice that swaps by itself."""

    tokens: int
    slot: int
    """Bytes that leave the device."""

    swapped: bool
    """Whether these are all of its activations. Otherwise it is recomputed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedBytes:
    """Bytes that a plan with `host_backed` needs."""

    slot: int
    """Bytes of a rounding buffer, which holds the largest slice."""

    host: int
    """Host bytes of all layer calls."""

    gradients: int
    """Part of `host` for gradients of keys and values."""

    staging: int
    """Device bytes of the buffers into which keys and values are fetched."""

    states: int = 0
    """Part of `host` for hidden states between layers."""

    slices: tuple[SliceBytes, ...] = ()
    """The slices of the layer call with the largest slot, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBytes:
    """Bytes that a plan with a storage plan needs, alignment included."""

    slot: int
    """Bytes of a rounding buffer: the most that one layer call stores on host and disk."""

    host: int
    """Host bytes of all layer calls."""

    kept: int
    """Device bytes of all layer calls."""

    spill: tuple[int, ...]
    """Disk bytes of each layer call, if it leaves the device."""
