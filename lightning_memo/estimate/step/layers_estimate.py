"""Prediction for the layers, which the training methods return."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_memo.estimate.request.estimate_request import Status, Storage


@dataclass(frozen=True, kw_only=True, slots=True)
class LayersEstimate:
    """Prediction for the layers of one sequence on the fullest device, without the model state."""

    status: Status
    alpha: float | None
    seconds: float
    """Time of forward and backward of all layers of a pipeline stage, and of the head."""

    recomputed: float
    """Fraction of the tokens whose activations are recomputed, or some of them if a plan names kinds of tensors."""

    recomputed_flops: float
    """FLOPs of the recomputation of one sequence, on all devices."""

    recompute_seconds: float
    """Part of `seconds` for recomputation, also if copies hide it."""

    device_bytes: dict[str, int]
    """Device memory by category."""

    host_bytes: int
    disk_bytes: int = field(default=0, kw_only=True)
    storage: Storage | None = None
    """What becomes of each kind of tensor; None without a plan by kinds."""

    limits: list[str]
