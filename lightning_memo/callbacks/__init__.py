"""Lightning callbacks: those that MemoStrategy adds by itself, what stands around its steps, and those for users."""

from lightning_memo.callbacks.device_watch import WatchDevice
from lightning_memo.callbacks.host_watch import WatchHost
from lightning_memo.callbacks.memory import PlanMemory
from lightning_memo.callbacks.monitor import Monitor
from lightning_memo.callbacks.out_of_memory import OutOfMemoryRetry
from lightning_memo.callbacks.plan import PlanAfterFirstStep
from lightning_memo.callbacks.progress_bar import StepProgressBar
from lightning_memo.callbacks.run_report import WriteReport
from lightning_memo.callbacks.schedule import ScheduleRecorder
from lightning_memo.callbacks.together import Together

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
