"""Applies autocast where PyTorch does not: to kernels that are called directly, and to recomputed forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor


def ambient_autocast(device_type: str) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Return a factory of a context with the autocast and the default dtype of now.

    With `precision="bf16-true"`, Lightning sets the default dtype for a training step, and the backward runs outside.
    """
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    default = torch.get_default_dtype()

    def again() -> contextlib.AbstractContextManager[Any]:
        autocast = torch.autocast(device_type, dtype=dtype, enabled=enabled)
        return autocast if torch.get_default_dtype() == default else _with_default(default, autocast)

    return again


@contextlib.contextmanager
def _with_default(dtype: torch.dtype, inner: contextlib.AbstractContextManager[Any]) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with inner:
            yield
    finally:
        torch.set_default_dtype(before)


def autocast_type(x: Tensor) -> torch.dtype | None:
    """Return the type in which autocast computes products with `x`; `None` if it is off."""
    kind = x.device.type
    on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if on else None


def autocast_inputs(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cast the inputs of an attention kernel as autocast casts those of `scaled_dot_product_attention`."""
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)
