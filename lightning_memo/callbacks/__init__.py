"""Lightning callbacks: those that MemoStrategy adds by itself, and those for a user's Trainer."""

from lightning_memo.callbacks.memory import PlanMemory
from lightning_memo.callbacks.monitor import Monitor
from lightning_memo.callbacks.plan import PlanAfterFirstStep
from lightning_memo.callbacks.run_report import WriteReport
from lightning_memo.callbacks.schedule import ScheduleRecorder

__all__ = ["Monitor", "PlanAfterFirstStep", "PlanMemory", "ScheduleRecorder", "WriteReport"]
