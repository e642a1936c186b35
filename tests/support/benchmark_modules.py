"""The modules of the benchmarks, which lie beside their scripts."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from support.paths import ROOT


def load(name: str) -> Any:
    """One of them, or any other module, where they can be imported."""
    return importlib.import_module(name)


@contextlib.contextmanager
def benchmark_modules() -> Iterator[None]:
    """Inside, they can be imported; afterwards they are forgotten."""
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield
    for name in set(sys.modules) - known:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
