"""Long-context training for PyTorch Lightning: token-wise activation swapping and recomputation.

Importing this package registers the strategy name "memo".
"""

import os as _os
import sys as _sys
from typing import Any as _Any

__all__ = ["MemoStrategy", "Plan"]
__version__ = "0.1.0"

_WITHOUT_TORCH = ("lightning_memo.place", "lightning_memo.estimate")


def _command() -> str:
    """The module that ``python -m`` is going to run, while it imports this package; else nothing."""
    return _sys.orig_argv[-len(_sys.argv)] if _sys.argv[:1] == ["-m"] else ""


def __getattr__(name: str) -> _Any:
    if name == "MemoStrategy":
        from lightning_memo.strategy import MemoStrategy

        return MemoStrategy
    if name == "Plan":
        from lightning_memo.artifacts.plan import Plan

        return Plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if _command().startswith(f"{__name__}."):
    # Before torch is imported. In measured steps it warns of each older buffer that is freed, which is no fault.
    _os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from lightning_memo.cli.interrupts import exit_on_interrupt as _exit_on_interrupt

    _exit_on_interrupt()  # before what takes seconds to import

if _command() not in _WITHOUT_TORCH:  # which takes seconds to import
    from lightning_memo.artifacts.plan import Plan
    from lightning_memo.strategy import MemoStrategy
