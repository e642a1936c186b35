"""Long-context training for PyTorch Lightning: token-wise activation swapping and recomputation.

Importing this package registers the strategy name "memo".
"""

from lightning_memo.plan import Plan
from lightning_memo.strategy import MemoStrategy

__all__ = ["MemoStrategy", "Plan"]
__version__ = "0.1.0"
