"""What more of each resource would save, from the dual variables of a plan's linear program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from lightning_memo.artifacts.costs import Budget

Resource = Literal[
    "device memory",
    "host memory",
    "disk space",
    "offload bandwidth",
    "prefetch bandwidth",
    "disk write bandwidth",
    "disk read bandwidth",
]
Unit = Literal["GiB", "MiB", "GB/s", "MB/s"]
_UNITS: Final[dict[Unit, float]] = {"GiB": 2.0**30, "MiB": 2.0**20, "GB/s": 1e9, "MB/s": 1e6}
# A resource is binding if increasing it by a small fraction shortens the step by more than this part of the fraction.
_LEAST_ELASTICITY: Final = 1e-6


def memory_limits(budget: Budget) -> dict[Resource, int]:
    """Return the bytes of each memory of a budget."""
    return {
        "device memory": budget.device_bytes,
        "host memory": budget.host_bytes,
        "disk space": budget.disk_bytes,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """Marginal value of a resource: a dual variable of the linear program."""

    resource: Resource
    limit: float
    """Available amount in bytes, or bytes per second."""

    seconds: float
    """Seconds by which the step becomes shorter per additional byte, or byte per second."""


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


def resource_sensitivities(
    prices: Sequence[Price], needs: Mapping[Resource, int], step_seconds: float
) -> list[ResourceSensitivity]:
    """Return the sensitivity of the step time to each resource.

    Args:
        prices: The dual variables.
        needs: Bytes of each memory that the plan needs.
        step_seconds: Expected seconds of a step.

    Returns:
        One entry for each resource. Binding resources come first, those with the largest gain before the others.
    """
    rows = [_sensitivity(price, needs.get(price.resource), step_seconds) for price in prices]
    return sorted(rows, key=lambda row: (not row.binds, -row.seconds))


def _sensitivity(price: Price, needed: int | None, step_seconds: float) -> ResourceSensitivity:
    units: tuple[Unit, Unit] = ("GB/s", "MB/s") if needed is None else ("GiB", "MiB")
    unit = units[0] if price.limit >= _UNITS[units[0]] else units[1]
    size = _UNITS[unit]
    gain = price.seconds * size
    return ResourceSensitivity(
        resource=price.resource,
        unit=unit,
        limit=price.limit / size,
        used=None if needed is None else needed / size,
        binds=price.seconds * price.limit > _LEAST_ELASTICITY * step_seconds,
        seconds=gain,
        percent=100 * gain / step_seconds if step_seconds else 0.0,
    )
