"""What limits a plan, and what more of each resource would bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from lightning_memo.artifacts.storage_plan import Resource, StoragePlan

Unit = Literal["GiB", "MiB", "GB/s", "MB/s"]

_UNITS: Final[dict[Unit, float]] = {"GiB": 2.0**30, "MiB": 2.0**20, "GB/s": 1e9, "MB/s": 1e6}
# A resource binds if a little more of it, in proportion, shortens the step by more than this share of that.
_LEAST_ELASTICITY: Final = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceSensitivity:
    """A row of the table that explains a plan."""

    resource: Resource
    unit: Unit
    """The smaller one where there is less than one of the larger."""

    limit: float
    """How much there is, in units."""

    used: float | None
    """How much of it the plan needs; None for bandwidths."""

    binds: bool
    """Whether a little more would shorten the step."""

    seconds: float
    """What one unit more would save of a step, at the rate at which the first bytes of it do: at most that."""

    percent: float
    """The same, in percent of the step."""


def resource_sensitivities(plan: StoragePlan) -> list[ResourceSensitivity]:
    """What binds, and what one more GiB of memory or GB/s of bandwidth would bring, from the duals of the program.

    Args:
        plan: as planned.

    Returns:
        One row for each resource, those that bring most first.
    """
    rows = [_explain(plan, price.resource, price.limit, price.seconds) for price in plan.prices]
    return sorted(rows, key=lambda row: (not row.binds, -row.seconds))


def _explain(plan: StoragePlan, resource: Resource, limit: float, seconds: float) -> ResourceSensitivity:
    used = {
        "device memory": plan.needs.device_bytes,
        "host memory": plan.needs.host_bytes,
        "NVMe space": plan.needs.nvme_bytes,
    }
    units: tuple[Unit, Unit] = ("GiB", "MiB") if resource in used else ("GB/s", "MB/s")
    unit = units[0] if limit >= _UNITS[units[0]] else units[1]
    size = _UNITS[unit]
    gain = seconds * size
    return ResourceSensitivity(
        resource=resource,
        unit=unit,
        limit=limit / size,
        used=used[resource] / size if resource in used else None,
        binds=seconds * limit > _LEAST_ELASTICITY * plan.bound_seconds,
        seconds=gain,
        percent=100 * gain / plan.bound_seconds if plan.bound_seconds else 0.0,
    )
