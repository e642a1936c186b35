"""Activations on the host, by TransformerEngine."""

from __future__ import annotations

CPUOffloadEnabled = False


def is_cpu_offload_enabled() -> bool:
    """Return whether activations are moved."""
    return CPUOffloadEnabled
