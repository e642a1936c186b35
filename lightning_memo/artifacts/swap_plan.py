"""The part of a plan that the engine executes: what is swapped, recomputed and kept, and the schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.artifacts.layer_costs import resident_calls
from lightning_memo.artifacts.slot_layouts import SpillLayout, SwapPrecision, whole_blocks
from lightning_memo.artifacts.storage_plan import StoragePlan
from lightning_memo.artifacts.tensor_kind_costs import ALL

MOST_CALLS: Final = 2**16
HostBacked = Literal["none", "attention", "all"]
Schedule = Literal["layer", "nest", "slice"]
Attention = Literal["sdpa", "cudnn", "flash_attn", "flash_attn_3", "flash_attn_4", "transformer_engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanMemory:
    """Bytes that a plan needs in addition to the model state and the transients of a step, alignment included."""

    slot: int = 0
    """Bytes of a rounding buffer: the most that one layer call stores on host and disk; one slice, if `host_backed` is
    not "none"."""

    host: int = 0
    """Host bytes of all layer calls, without the bounce buffers of the disk."""

    spill: tuple[int, ...] = ()
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


@dataclass(frozen=True, kw_only=True)  # without slots, for properties that are computed once
class SwapPlan:
    """Where activations wait for the backward, and how the layers run.

    Raises:
        ValueError: A count is negative, or there are more than 65,536 layer calls.
    """

    storage: StoragePlan
    memory: PlanMemory
    schedule: Schedule

    host_backed: HostBacked = "none"
    """Tensors that live on the host in addition to the swapped activations. With "attention", each slice swaps into its
    own slot, and the keys and values of earlier slices are fetched for it. With "all", the gradients of keys and
    values and the hidden states between layers live on the host, too."""

    in_flight: int | None = None
    """On a stage of a pipeline, number of micro-batches that the layer calls belong to; None without a pipeline."""

    attention: Attention = "sdpa"
    """Attention kernel of the layers, unless they train plainly."""

    precision: SwapPrecision = "exact"
    """How activations are swapped. With "fp8", sizes of slots are those of compressed tensors."""

    def __post_init__(self) -> None:
        check_range(self, {"in_flight": 1})
        if self.calls > MOST_CALLS:  # sizes are sums over the calls
            raise ValueError(f"storage.call_classes has {self.calls} layer calls, and must have at most {MOST_CALLS}")
        if len(self.memory.spill) not in (0, self.calls):
            raise ValueError(f"memory.spill must have an entry for each of the {self.calls} layer calls, or none")
        if self.streamed and self.spilled_calls:
            raise ValueError("memory.spill must be empty if host_backed is not none: slots of slices use no disk")

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
        return self.storage.share(ALL, "swap", "spill")

    @property
    def recomputed(self) -> float:
        """Fraction of the tokens of all layer calls of which tensors are computed again."""
        return 1.0 - self.storage.share(ALL)

    @property
    def streamed(self) -> bool:
        """Whether each slice swaps into its own slot, and keys and values of earlier slices come from the host."""
        return self.host_backed != "none"

    @property
    def executed(self) -> SwapPlan:
        """The plan without measured and expected numbers, to compare what is executed."""
        return replace(self, storage=self.storage.executed)

    @cached_property
    def swapped_calls(self) -> int:
        """Number of layer calls whose activations leave the device.

        All do if streamed, or if several micro-batches are in flight; otherwise all but the last two.
        """
        if self.plain:
            return 0
        return self.calls if self.streamed else self.calls - resident_calls(self.calls, self.in_flight)

    @cached_property
    def spilled_calls(self) -> tuple[int, ...]:
        """The layer calls that use the disk."""
        return tuple(call for call in range(self.swapped_calls) if self.disk_bytes(call))

    def disk_bytes(self, call: int) -> int:
        """Bytes of a layer call's slot that go to the disk."""
        return self.memory.spill[call % self.calls] if self.memory.spill else 0

    @property
    def host_bytes(self) -> int:
        """Host bytes for swapped activations: slots, and the bounce buffers of the disk."""
        return self.memory.host + self.spill_layout.bounce_bytes

    @property
    def spill_layout(self) -> SpillLayout:
        """Layout of the largest spilled slot."""
        return SpillLayout(max(map(self.disk_bytes, range(self.swapped_calls)), default=0))

    @property
    def spill_bytes(self) -> int:
        """Disk bytes of all layer calls."""
        return sum(whole_blocks(self.disk_bytes(call)) for call in range(self.swapped_calls))

    @property
    def buffer_bytes(self) -> int:
        """Device bytes of the two rounding buffers and of the buffers for fetched keys and values."""
        return 2 * self.memory.slot + self.memory.staging
