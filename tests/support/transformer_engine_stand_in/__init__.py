"""A package `transformer_engine` that follows the protocol of TransformerEngine 2.20 on a CPU, for tests only.

It has the modules, the global state, the recipes and the way of saving tensors of
`transformer_engine/pytorch` (https://github.com/NVIDIA/TransformerEngine, release 2.20.2), with real rounding to FP8
and no kernels. `tests/reference/transformer_engine_protocol.json` holds what of it is compared with the sources.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

NAME = "transformer_engine"
FOLDER = Path(__file__).parent


def _loaded() -> dict[str, ModuleType]:
    return {name: m for name, m in sys.modules.items() if name.partition(".")[0] == NAME}


@contextlib.contextmanager
def stand_in() -> Iterator[ModuleType]:
    """Make the package importable inside the context. Returns `transformer_engine.pytorch`."""
    before = _loaded()
    for name in before:
        del sys.modules[name]
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module(f"{NAME}.pytorch")
    finally:
        sys.path.remove(str(FOLDER))
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(before)
