"""Long-context training for PyTorch Lightning: token-wise activation swapping and recomputation.

Importing this package registers the strategy name "memo".
"""

import sys as _sys
from typing import Any as _Any

__all__ = ["MemoStrategy", "Plan"]
__version__ = "0.1.0"

_WITHOUT_TORCH = ("lightning_memo.place", "lightning_memo.estimate")


def _runs_without_torch() -> bool:
    """Whether Python was started for a command that needs neither torch nor Lightning, which take seconds to import."""
    return _sys.argv[:1] == ["-m"] and _sys.orig_argv[-len(_sys.argv)] in _WITHOUT_TORCH


def __getattr__(name: str) -> _Any:
    if name == "MemoStrategy":
        from lightning_memo.strategy import MemoStrategy

        return MemoStrategy
    if name == "Plan":
        from lightning_memo.plan import Plan

        return Plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not _runs_without_torch():
    from lightning_memo.plan import Plan
    from lightning_memo.strategy import MemoStrategy
