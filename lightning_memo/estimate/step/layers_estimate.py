"""What a method makes of the layers of one sequence on one device."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_memo.estimate.request.question import Status


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersEstimate:
    """Of one sequence on the fullest device; the model's state apart."""

    status: Status
    alpha: float | None
    seconds: float
    """Of all layers of a stage, forward and backward, and of the head."""

    recomputed: float
    """Share of the tokens of which layers are computed again."""

    device_bytes: dict[str, int]
    """By kind."""

    host_bytes: int
    disk_bytes: int = field(default=0, kw_only=True)
    limits: list[str]
