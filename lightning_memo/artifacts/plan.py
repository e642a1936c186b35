"""The plan of a run: where the tensors of layer calls wait for the backward, and what it was made from."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.table import Table
from rich.text import Text

from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.artifacts.costs import OTHER, Budget, LayerCosts, StorageCosts
from lightning_memo.artifacts.json_documents import check_range, read_json
from lightning_memo.artifacts.plan_tables import (
    call_bytes,
    calls_table,
    kinds_table,
    percents,
    resources_table,
    trials_table,
)
from lightning_memo.artifacts.prices import Price, ResourceSensitivity, memory_limits, resource_sensitivities
from lightning_memo.artifacts.swap_plan import AttentionTrial, StreamFromHost, SwapPlan, step_device_bytes
from lightning_memo.utils.files import replacing
from lightning_memo.utils.tables import html_of, text_of
from lightning_memo.utils.units import format_bytes, format_seconds

VERSION: Final = 3
_IN_LINE: Final = ("plan", "step", "device memory")
_STREAMED: Final[dict[StreamFromHost, str]] = {
    "none": "",
    "attention": ", keys and values on the host",
    "hidden": ", keys, values and hidden states on the host",
    "model": ", everything but the current slice on the host",
}


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

    @property
    def sensitivities(self) -> list[ResourceSensitivity]:
        """What more of each resource would save; empty unless the plan was made from the costs of kinds of tensors."""
        needs = Budget(device_bytes=self.device_bytes, host_bytes=self.swap.host_bytes, disk_bytes=self.swap.disk_bytes)
        return resource_sensitivities(self.prices, memory_limits(needs), self.step_seconds)

    def __str__(self) -> str:
        return text_of(self.table)

    def _repr_html_(self) -> str:
        return html_of(self.table)

    def explain(self) -> str:
        """Return all that is known of the plan as text: its table, and those of calls, kinds, kernels and resources."""
        return text_of(self.table, *self.details)

    @property
    def table(self) -> Table:
        """What the plan does with activations, what it needs, and what limits it, in at most ten rows."""
        of = self.fingerprint
        title = Text(f"{of.model.rpartition('-')[0] or of.model}, {of.batch} x {of.tokens:,} tokens")
        table = Table(title=title, title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for name, text in self._rows():
            table.add_row(name, Text(text))
        return table

    @property
    def line(self) -> str:
        """The most important rows of the table on one line."""
        return "; ".join(f"{name}: {text}" for name, text in self._rows() if name in _IN_LINE)

    @property
    def details(self) -> list[Table]:
        """The tables that `explain` adds."""
        costs, sensitivities = self.storage_costs, self.sensitivities
        tables = [calls_table(self.swap, costs or StorageCosts.of_layers(self.costs))]
        if costs is not None:
            tables.append(kinds_table(self.swap.storage, costs))
        if self.attention_trials and not self.swap.plain:
            tables.append(trials_table(self.attention_trials))
        if any(row.binds for row in sensitivities):
            tables.append(resources_table(sensitivities))
        return tables

    def _rows(self) -> list[tuple[str, str]]:
        swap, budget = self.swap, self.budget
        calls = list(call_bytes(swap, self.storage_costs or StorageCosts.of_layers(self.costs)))
        moved, again, kept = (sum(sizes) for sizes in zip(*calls, strict=True))
        rows = [("plan", self._what()), ("step", self._step())]
        for name, size, percent in zip(
            ("kept", "swapped", "recomputed"), (kept, moved, again), percents((kept, moved, again)), strict=True
        ):
            rows.append((name, f"{format_bytes(size)}, {percent} % of the activations" if size else "-"))
        parts = (self.costs.fixed_device_bytes, self.working_set_bytes)
        state = ": {} model state + {} step".format(*map(format_bytes, parts))
        over = f"; over by {format_bytes(self.device_excess_bytes)}" if self.device_excess_bytes else ""
        memories = [
            ("device memory", self.device_bytes, budget.device_bytes, state + over),
            ("host memory", swap.host_bytes, budget.host_bytes, ""),
            ("disk", swap.disk_bytes, budget.disk_bytes, f", for {len(swap.disk_calls)} layer calls"),
        ]
        rows += [
            (name, f"{format_bytes(needed)} of {format_bytes(there)}{more}")
            for name, needed, there, more in memories
            if there
        ]
        return [*rows, ("limit", self.reason)]

    def _what(self) -> str:
        swap, storage = self.swap, self.swap.storage
        if swap.plain:
            return "plain: nothing is swapped or recomputed"
        of_layers = " of the layers" if len({call.tokens(OTHER) for call in storage.calls}) > 1 else ""
        what = f"alpha={swap.alpha:.4g}{of_layers}" if storage.has_one_alpha else "by kind of tensor"
        joint = ", joint attention of all slices" if swap.joint_attention else ""
        slices = "" if storage.slice_tokens is None else f", slices of at most {storage.slice_tokens:,} tokens"
        return f"{what}{joint}{slices}{_STREAMED[swap.stream_from_host]}, {swap.attention} attention"

    def _step(self) -> str:
        seconds, in_flight = format_seconds(self.step_seconds), self.costs.in_flight
        if in_flight is None:
            return f"{seconds} expected"
        several = f"the {in_flight} micro-batches" if in_flight > 1 else "the micro-batch"
        return f"{seconds} expected for all layer calls of {several} in flight"

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
