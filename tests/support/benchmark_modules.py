"""Import the modules of the benchmarks, which lie next to their scripts."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from support.paths import ROOT


def load(name: str) -> Any:
    """Import a module, for example one of the benchmarks."""
    return importlib.import_module(name)


@contextlib.contextmanager
def benchmark_modules() -> Iterator[None]:
    """Make the modules importable in the context, and remove them from `sys.modules` afterwards."""
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield
    for name in set(sys.modules) - known:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
