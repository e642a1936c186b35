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
from lightning_memo.artifacts.tensor_kind_costs import ALL, StorageCosts
from lightning_memo.utils.files import replacing

VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """Identifies the run that a plan is valid for. A run with another fingerprint needs another plan."""

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
    """Result of timing an attention kernel on calls like those of the model."""

    name: Attention

    seconds: float | None = None
    """Seconds of forward and backward on the slowest process; None if not measured."""

    why_not: str = ""
    """Why the kernel cannot be used, in one line; empty if it can."""

    def __post_init__(self) -> None:
        check_range(self, {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A swap plan with everything it was made from, and the placement of buffers once that is known."""

    fingerprint: Fingerprint
    costs: LayerCosts
    budget: Budget
    swap: SwapPlan
    step_seconds: float
    """Expected seconds of a step."""

    reason: str
    """Why this alpha, or why plain training, in a few sentences."""

    placement: StepPlacement | None = None
    """Offsets of the buffers; None if PyTorch's allocator chooses them."""

    storage_costs: StorageCosts | None = None
    """Costs of each kind of tensor, if the plan was made from them (`storage="kinds"`)."""

    attention_trials: tuple[AttentionTrial, ...] = ()
    """The attention kernels among which one was chosen."""

    version: int = VERSION

    def __post_init__(self) -> None:
        check_range(self, {})
        if self.version != VERSION:
            raise ValueError(f"version={self.version} cannot be read: this lightning_memo reads version {VERSION}")
        storage, kinds = self.swap.storage, self.storage_costs
        if storage is not None and kinds is not None:
            described = (storage.tokens, len(storage.calls)), (kinds.tokens, len(kinds.classes))
            if described[0] != described[1]:
                raise ValueError(
                    "swap.storage has {} tokens and {} classes of layer calls, but storage_costs has {} and {}: the "
                    "numbers must be equal".format(*described[0], *described[1])
                )

    def to_json(self) -> str:
        """Convert the plan to JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan from the JSON that `to_json` returns.

        Args:
            text: The JSON.

        Raises:
            ValueError: The text is not a plan of this version. The message is one line that names the field.
        """
        return read_json(cls, text, VERSION)

    @property
    def device_bytes(self) -> int:
        """Device bytes that the plan needs: model state, the highest transient peak and the kept activations."""
        return self.costs.fixed_device_bytes + self.working_set_bytes

    @property
    def working_set_bytes(self) -> int:
        """Device bytes apart from the model state: the highest transient peak and the kept activations."""
        if self.swap.mode == "plain":
            return self.costs.working_bytes(0.0) + self.costs.skeletal_bytes
        if self.swap.storage is not None:
            costs, stored = self.storage_costs, [call.tokens(ALL) for call in self.swap.storage.calls]
            transient = self.costs.working_bytes(1.0) if costs is None else costs.working_bytes(stored)
            return transient + self.swap.buffer_bytes + self.swap.kept_bytes
        return self.costs.working_bytes_at(self.swap.least_alpha, self.swap.slice_tokens) + self.swap.buffer_bytes

    @property
    def device_excess_bytes(self) -> int:
        """Device bytes by which the plan exceeds the budget."""
        return max(self.device_bytes - self.budget.device_bytes, 0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Readers see either the old or the new file, never a partial one.

        Args:
            path: The file. Its folder is created if missing.
        """
        with replacing(Path(path)) as unfinished, unfinished.open("x", encoding="utf-8") as file:
            file.write(f"{self.to_json()}\n")
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that was written by `save`.

        Args:
            path: The file.

        Raises:
            OSError: The file cannot be read.
            ValueError: The file is not a plan of this version. The message is one line that names file and field.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(
                f"{os.fspath(path)}: not a plan: {error}; give a file that plan.save() has written, or plan=None"
            ) from None
