"""A mark for tests that compile C++."""

from __future__ import annotations

import pytest

from lightning_memo.utils import native_build as native


def _have_compiler() -> bool:
    try:
        native.find_compiler()
    except native.BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not _have_compiler(), reason="no C++ compiler")
