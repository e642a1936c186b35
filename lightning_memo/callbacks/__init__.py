"""Lightning callbacks that users add to a Trainer. MemoStrategy adds those in `strategy_callbacks.py` by itself."""

from lightning_memo.callbacks.monitor import Monitor
from lightning_memo.callbacks.progress_bar import StepProgressBar
from lightning_memo.callbacks.record_schedule import ScheduleRecorder
from lightning_memo.callbacks.run_report import WriteReport

__all__ = ["Monitor", "ScheduleRecorder", "StepProgressBar", "WriteReport"]
