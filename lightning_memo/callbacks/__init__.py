"""Lightning callbacks: those that MemoStrategy adds by itself, what stands around its steps, and those for users."""

from lightning_memo.callbacks.monitor import Monitor
from lightning_memo.callbacks.planning.callback_group import Together
from lightning_memo.callbacks.planning.device_watch import WatchDevice
from lightning_memo.callbacks.planning.host_watch import WatchHost
from lightning_memo.callbacks.planning.out_of_memory import OutOfMemoryRetry
from lightning_memo.callbacks.planning.plan_after_first_step import PlanAfterFirstStep
from lightning_memo.callbacks.planning.plan_memory import PlanMemory
from lightning_memo.callbacks.progress_bar import StepProgressBar
from lightning_memo.callbacks.record_schedule import ScheduleRecorder
from lightning_memo.callbacks.run_report import WriteReport

__all__ = [
    "Monitor",
    "OutOfMemoryRetry",
    "PlanAfterFirstStep",
    "PlanMemory",
    "ScheduleRecorder",
    "StepProgressBar",
    "Together",
    "WatchDevice",
    "WatchHost",
    "WriteReport",
]
