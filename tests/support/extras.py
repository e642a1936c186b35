"""Packages of the optional extras."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest


def extra(package: str, name: str) -> Any:
    """Import a package of the extra `name`. Without it tests are skipped, or fail in `make test`, which installs it."""
    if "EXTRAS_REQUIRED" in os.environ:
        return importlib.import_module(package)
    return pytest.importorskip(package, reason=f"pip install -e .[{name}]")
