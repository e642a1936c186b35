"""Sensitivity of a plan: which resources limit the step time, and the gain from more of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from lightning_memo.artifacts.storage_plan import Resource, StoragePlan

Unit = Literal["GiB", "MiB", "GB/s", "MB/s"]

_UNITS: Final[dict[Unit, float]] = {"GiB": 2.0**30, "MiB": 2.0**20, "GB/s": 1e9, "MB/s": 1e6}
# A resource is binding if increasing it by a small fraction shortens the step by more than this part of the fraction.
_LEAST_ELASTICITY: Final = 1e-6


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceSensitivity:
    """How the step time depends on one resource."""

    resource: Resource
    unit: Unit
    """Unit of the numbers; the smaller unit if there is less than one of the larger."""

    limit: float
    """Available amount."""

    used: float | None
    """Amount that the plan needs; None for bandwidths."""

    binds: bool
    """Whether more of the resource would shorten the step."""

    seconds: float
    """Upper bound of the seconds that one more unit saves: its first bytes save the most."""

    percent: float
    """`seconds` in percent of the step."""


def resource_sensitivities(plan: StoragePlan) -> list[ResourceSensitivity]:
    """Sensitivity of the step time to each resource, from the dual variables of the linear program.

    Args:
        plan: A plan with its prices.

    Returns:
        One entry for each resource. Binding resources come first, those with the largest gain before the others.
    """
    rows = [_sensitivity(plan, price.resource, price.limit, price.seconds) for price in plan.prices]
    return sorted(rows, key=lambda row: (not row.binds, -row.seconds))


def _sensitivity(plan: StoragePlan, resource: Resource, limit: float, seconds: float) -> ResourceSensitivity:
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
