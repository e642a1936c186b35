"""Parametrizations that a layer registers in its forward, as PEFT does for LoRA on parameters of experts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.utils import parametrize


@contextmanager
def unchanged_by_registration() -> Iterator[None]:
    """Inside, registering a parametrization does not set a weight to itself, which counts as a change in place."""
    before = parametrize._maybe_set
    parametrize._maybe_set = _set_other
    try:
        yield
    finally:
        parametrize._maybe_set = before


def _set_other(dest: Any, source: Any, set_to: Any = parametrize._maybe_set) -> None:
    if dest is not source:
        set_to(dest, source)
