"""The plan of a run, saved as JSON with a version."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.artifacts.json_documents import check_range, read_json
from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.swap_plan import Attention, SwapPlan
from lightning_memo.artifacts.tensor_kind_costs import StorageCosts
from lightning_memo.utils.files import replacing

VERSION: Final = 1


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
