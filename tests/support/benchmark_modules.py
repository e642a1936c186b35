"""Import the modules of the benchmarks, which lie next to their scripts."""

from __future__ import annotations

import contextlib
import importlib
import signal
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
    """Make the modules importable in the context; remove them, and their handler of SIGTERM, afterwards."""
    known, handler = set(sys.modules), signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield
    signal.signal(signal.SIGTERM, handler)
    for name in set(sys.modules) - known:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
