"""What tests need and a machine may lack: packages of the optional extras, and a C++ compiler."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from lightning_memo.utils import native_build as native


def extra(package: str, name: str) -> Any:
    """Import a package of the extra `name`. Without it tests are skipped, or fail in `make test`, which installs it."""
    if "EXTRAS_REQUIRED" in os.environ:
        return importlib.import_module(package)
    return pytest.importorskip(package, reason=f"pip install -e .[{name}]")


def _have_compiler() -> bool:
    try:
        native.find_compiler()
    except native.BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not _have_compiler(), reason="no C++ compiler")
"""Marks tests that compile C++."""
