"""A package `transformer_engine` that follows the protocol of TransformerEngine 2.20 on a CPU, for tests only.

It has the modules, the global state, the recipes and the way of saving tensors of
`transformer_engine/pytorch` (https://github.com/NVIDIA/TransformerEngine, release 2.20.2), with real rounding to FP8
and no kernels. `tests/reference/transformer_engine_protocol.json` holds what of it is compared with the sources.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from lightning.fabric.plugins.precision import transformer_engine as fabric
from lightning_utilities.core.imports import RequirementCache

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


def find_in(folder: Path) -> None:
    """Let Lightning find metadata of TransformerEngine in a folder. It looks for them once in a process."""
    folder = folder / str(os.getpid())  # another process may write at the same time
    info = folder / "transformer_engine-2.20.2.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer_engine\nVersion: 2.20.2\n")
    sys.path.insert(0, str(folder))
    fabric._TRANSFORMER_ENGINE_AVAILABLE = RequirementCache("transformer_engine>=0.11.0")
    assert fabric._TRANSFORMER_ENGINE_AVAILABLE
    sys.path.remove(str(folder))
