"""Packages that extras bring."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def extra(package: str, name: str) -> Any:
    """A package of the extra `name`; tests are skipped without it, but not by `make test`, which installs it."""
    if "EXTRAS_REQUIRED" in os.environ:
        return importlib.import_module(package)
    return pytest.importorskip(package, reason=f"pip install -e .[{name}]")
