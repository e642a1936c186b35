"""Lightning callbacks that MemoStrategy adds by itself."""

from lightning_memo.callbacks.memory import PlanMemory
from lightning_memo.callbacks.plan import PlanAfterFirstStep

__all__ = ["PlanAfterFirstStep", "PlanMemory"]
