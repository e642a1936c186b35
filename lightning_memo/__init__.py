"""Long-context training for PyTorch Lightning: token-wise activation swapping and recomputation.

Importing this package registers the strategy name "memo" with Lightning, for `Trainer(strategy="memo")`. It imports
neither torch nor Lightning, which take seconds to import.
"""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import wrapt

if TYPE_CHECKING:
    from lightning_memo.artifacts.plan import Plan
    from lightning_memo.memo_callback import MemoCallback
    from lightning_memo.memo_loop import MemoLoop
    from lightning_memo.strategy import MemoStrategy

__all__ = ["MemoCallback", "MemoLoop", "MemoStrategy", "Plan"]
__version__ = "0.1.0"

_LAZY = {
    "MemoCallback": "lightning_memo.memo_callback",
    "MemoLoop": "lightning_memo.memo_loop",
    "MemoStrategy": "lightning_memo.strategy",
    "Plan": "lightning_memo.artifacts.plan",
}
_PACKAGES = {"callbacks", "config", "data", "engine", "estimate", "kernels", "models", "planner", "strategy"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _memo_strategy(**settings: Any) -> "MemoStrategy":
    from lightning_memo.strategy import MemoStrategy

    return MemoStrategy(**settings)


@wrapt.when_imported("lightning.pytorch.strategies")  # at once, if Lightning is imported already
def _register(strategies: ModuleType) -> None:
    description = "Token-wise swapping and recomputation of activations"
    strategies.StrategyRegistry.register("memo", _memo_strategy, description, override=True)  # for a reload
