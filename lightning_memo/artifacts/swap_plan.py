"""What a step swaps, recomputes and keeps, and how its layers run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.artifacts.spill_layout import SpillLayout, whole_blocks
from lightning_memo.artifacts.storage_plan import StoragePlan

MOST_CALLS: Final = 2**16
HostBacked = Literal["none", "attention", "all"]
Schedule = Literal["layer", "nest", "slice"]
Attention = Literal["sdpa", "cudnn", "flash_attn", "transformer_engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SwapPlan:
    """What is swapped, and how the layers run.

    Raises:
        ValueError: alpha outside 0 to 1, a negative count, or more layer calls than any model has.
    """

    mode: Literal["memo", "plain"]
    """"plain": nothing is swapped or recomputed."""

    alpha: float
    """Fraction of the tokens whose skeletal activations are swapped; 0.0 in "plain"."""

    schedule: Schedule
    slice_tokens: int | None
    """Most tokens that run through a layer at once; None: no limit."""

    calls: int
    """Layer calls alive at once: n, or 2n when two forwards precede one backward."""

    slot_bytes: int
    """Bytes of a rounding buffer: what one layer call swaps, or one slice where slices swap for themselves."""

    host_backed: HostBacked = "none"
    """What lives on the host beside what is swapped: "attention": slices swap for themselves, and earlier keys and
    values come back for each of them; "all": their gradients too, and hidden states between layers."""

    streamed_host_bytes: int = 0
    """Host bytes of all layer calls where slices swap for themselves."""

    gradient_host_bytes: int = 0
    """Those of them that are for gradients of keys and values."""

    state_host_bytes: int = 0
    """Those of them that are for hidden states between layers, and their gradients."""

    staging_bytes: int = 0
    """Device bytes of the buffers through which keys and values pass."""

    storage: StoragePlan | None = None
    """What is stored kind by kind, and where; None: alpha says it. Alpha is then the fraction of the tokens of which
    everything is swapped."""

    stored_host_bytes: int = 0
    """Host bytes of all layer calls, alignment included, where that is said kind by kind; bounce buffers excluded."""

    stored_spill_bytes: tuple[int, ...] = ()
    """Bytes that each layer call has for the disk, alignment included, where that is said kind by kind; empty: none."""

    kept_bytes: int = 0
    """Device bytes that all layer calls keep beside the rounding buffers, where that is said kind by kind."""

    spilled_calls: int = 0
    """Layer calls among the swapped ones whose activations go to a file on a disk, not to the host."""

    attention: Attention = "sdpa"
    """Attention kernel of the layers, where they do not run plainly."""

    def __post_init__(self) -> None:
        check_range(self, {"calls": 1, "slice_tokens": 1})
        if self.alpha > 1.0:
            raise ValueError(f"alpha={self.alpha!r} must be from 0.0 to 1.0")
        if self.calls > MOST_CALLS:  # sizes are sums over them
            raise ValueError(f"calls={self.calls} must be at most {MOST_CALLS}")
        if self.spilled_calls > (0 if self.streamed else self.swapped_calls):
            raise ValueError(f"spilled_calls={self.spilled_calls} must be at most the calls that are swapped whole")
        if len(self.stored_spill_bytes) not in (0, self.calls):
            raise ValueError(f"stored_spill_bytes must have an entry for each of the {self.calls} layer calls, or none")

    @property
    def streamed(self) -> bool:
        """Whether slices swap for themselves, and earlier keys and values come from the host."""
        return self.host_backed != "none"

    @property
    def executed(self) -> SwapPlan:
        """What is done, without what was measured and expected."""
        return self if self.storage is None else replace(self, storage=self.storage.executed)

    @property
    def swapped_calls(self) -> int:
        """Layer calls whose activations leave the device: all but the last two (MEMO, section 4.2), if not streamed."""
        if self.mode == "plain":
            return 0
        return self.calls if self.streamed else max(self.calls - 2, 0)

    @property
    def host_bytes(self) -> int:
        """Host bytes for swapped activations: slots, and buffers through which those of the disk pass."""
        if self.streamed:
            return self.streamed_host_bytes
        whole_slots = (self.swapped_calls - self.spilled_calls) * self.slot_bytes
        stored_bytes = whole_slots if self.storage is None else self.stored_host_bytes
        return stored_bytes + self.spill_layout.bounce_bytes

    @property
    def spill_layout(self) -> SpillLayout:
        """Sizes for the most that a layer call has on the disk."""
        return SpillLayout(max(map(self.bytes_to_spill, range(self.swapped_calls)), default=0))

    @property
    def spill_bytes(self) -> int:
        """Bytes on the disk."""
        return sum(whole_blocks(self.bytes_to_spill(call)) for call in range(self.swapped_calls))

    def bytes_to_spill(self, call: int) -> int:
        """How much of a layer call's slot is for the disk."""
        if self.storage is None:
            return self.slot_bytes if self.spills(call) else 0
        return self.stored_spill_bytes[call % self.calls] if self.stored_spill_bytes else 0

    def spills(self, call: int) -> bool:
        """Whether a layer call is spilled whole. Those are as far from each other as can be: the disk is slower."""
        return call < self.swapped_calls and call * self.spilled_calls % self.swapped_calls < self.spilled_calls

    @property
    def buffer_bytes(self) -> int:
        """Device bytes of the two rounding buffers, and of those through which keys and values pass."""
        return 2 * self.slot_bytes + self.staging_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamedBytes:
    """Memory of a plan by which slices swap for themselves, and keys and values pass the device in blocks."""

    slot: int
    """Of a rounding buffer: the largest slice."""

    host: int
    """Of all layer calls."""

    gradients: int
    """Those of them that are for gradients of keys and values."""

    staging: int
    """Of the device buffers through which keys and values pass."""

    states: int = 0
    """Of hidden states between layers; included in `host`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredBytes:
    """Memory of a plan that says kind by kind what is stored."""

    slot: int
    """Of a rounding buffer: the most that a layer call has for host and disk, alignment included."""

    host: int
    """Of all layer calls."""

    kept: int
    """On the device, of all layer calls."""

    spill: tuple[int, ...]
    """On the disk, of each layer call if it leaves the device."""
