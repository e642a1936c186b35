"""The documents that travel from profiling to planning to execution.

They are plain data, saved as JSON with a version. Pure: imports neither torch nor Lightning.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal

from lightning_memo.artifacts.json_documents import check_range, read_json
from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.spill_sizes import SpillSizes, whole_blocks
from lightning_memo.artifacts.storage_costs import StorageCosts
from lightning_memo.artifacts.storage_plan import StoragePlan
from lightning_memo.utils.files import replacing

__all__ = [
    "Attention",
    "AttentionTrial",
    "Budget",
    "Fingerprint",
    "HostBacked",
    "LayerCosts",
    "PhasePlacement",
    "Plan",
    "Schedule",
    "StepPlacement",
    "StoredBytes",
    "StreamedBytes",
    "SwapPlan",
]

VERSION: Final = 1
MOST_CALLS: Final = 2**16
HostBacked = Literal["none", "attention", "all"]
Schedule = Literal["layer", "nest", "slice"]
Attention = Literal["sdpa", "cudnn", "flash_attn", "transformer_engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """What a plan is valid for; a plan whose fingerprint differs from the run's must be made again."""

    model: str
    batch: int
    tokens: int
    precision: str
    device: str
    torch: str
    parallel: str

    def __post_init__(self) -> None:
        check_range(self, {"batch": 1, "tokens": 1})


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
        return stored_bytes + self.spill_sizes.bounce_bytes

    @property
    def spill_sizes(self) -> SpillSizes:
        """Sizes for the most that a layer call has on the disk."""
        return SpillSizes(max(map(self.bytes_to_spill, range(self.swapped_calls)), default=0))

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


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionTrial:
    """How an attention kernel did on calls like the model's."""

    name: Attention

    seconds: float | None = None
    """Forward and backward, on the slowest process; None: it was not measured."""

    why_not: str = ""
    """Why it is not used, one line; empty: it could be."""

    def __post_init__(self) -> None:
        check_range(self, {})


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A swap plan with everything it was made from, and the places of buffers once those are planned."""

    fingerprint: Fingerprint
    costs: LayerCosts
    budget: Budget
    swap: SwapPlan
    step_seconds: float
    """Expected time of a step."""

    reason: str
    """One sentence: why this alpha, or why plain."""

    placement: StepPlacement | None = None
    """None: buffers lie where PyTorch's allocator puts them."""

    storage_costs: StorageCosts | None = None
    """What a plan was made from that says kind by kind what is stored."""

    attention_trials: tuple[AttentionTrial, ...] = ()
    """The attention kernels that were looked at when one of them was chosen."""

    version: int = VERSION

    def __post_init__(self) -> None:
        check_range(self, {})
        if self.version != VERSION:
            raise ValueError(f"version={self.version} is not readable: this lightning_memo reads version {VERSION}")

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            ValueError: the text is not a plan of this version; one line names the field.
        """
        return read_json(cls, text, VERSION)

    @property
    def device_bytes(self) -> int:
        """Device bytes that the plan needs: model state, the highest transient peak, and the activations kept."""
        return self.costs.fixed_device_bytes + self.working_set_bytes

    @property
    def working_set_bytes(self) -> int:
        """Device bytes beside the model state: the highest transient peak, and the activations kept."""
        if self.swap.mode == "plain":
            return self.costs.working_bytes(0.0) + self.costs.skeletal_bytes
        if self.swap.storage is not None:  # a recomputed layer has all its tokens alive
            return self.costs.working_bytes(1.0) + self.swap.buffer_bytes + self.swap.kept_bytes
        return self.costs.working_bytes_at(self.swap.alpha, self.swap.slice_tokens) + self.swap.buffer_bytes

    @property
    def device_excess_bytes(self) -> int:
        """Device bytes that the plan needs and the budget has not got."""
        return max(self.device_bytes - self.budget.device_bytes, 0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; a reader sees the old file or the new one, never a part.

        Args:
            path: the file; its folder is made if missing.
        """
        with replacing(Path(path)) as unfinished, unfinished.open("x", encoding="utf-8") as file:
            file.write(f"{self.to_json()}\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Args:
            path: the file.

        Raises:
            OSError: the file can't be read.
            ValueError: the file is not a plan of this version; one line names the file and the field.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: not a plan: {error}; delete it and let a run make it again") from None
