"""The plan of a run: where the tensors of layer calls wait for the backward, and what it was made from."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.artifacts.costs import Budget, LayerCosts, StorageCosts
from lightning_memo.artifacts.json_documents import check_range, read_json
from lightning_memo.artifacts.swap_plan import AttentionTrial, Price, SwapPlan, step_device_bytes
from lightning_memo.utils.files import replacing

VERSION: Final = 3


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
    """Costs of each kind of tensor, if the plan was made from them."""

    prices: tuple[Price, ...] = ()
    """Value of more of each resource, if the plan was made from the costs of each kind of tensor."""

    attention_trials: tuple[AttentionTrial, ...] = ()
    """The attention kernels among which one was chosen."""

    version: int = VERSION

    def __post_init__(self) -> None:
        check_range(self, {})
        if self.version != VERSION:
            raise ValueError(f"version={self.version} cannot be read: this lightning_memo reads version {VERSION}")
        storage, kinds = self.swap.storage, self.storage_costs
        if self.swap.calls % self.costs.calls:
            raise ValueError(
                f"swap.storage.call_classes must have a class for each of the {self.costs.calls} layer calls, but has "
                f"{self.swap.calls}"
            )
        if kinds is not None and (storage.tokens, len(storage.calls)) != (kinds.tokens, len(kinds.classes)):
            raise ValueError(
                f"swap.storage has {storage.tokens} tokens and {len(storage.calls)} classes of layer calls, but "
                f"storage_costs has {kinds.tokens} and {len(kinds.classes)}: the numbers must be equal"
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
        return step_device_bytes(self.costs, self.swap.storage, self.swap.memory)

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
