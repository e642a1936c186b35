"""Lightning callbacks that users add to a Trainer. MemoStrategy itself adds one that drives the runtime."""

from lightning_memo.callbacks.monitor import Monitor, StepProgressBar
from lightning_memo.callbacks.run_report import ScheduleRecorder, WriteReport

__all__ = ["Monitor", "ScheduleRecorder", "StepProgressBar", "WriteReport"]
