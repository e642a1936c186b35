"""Draws the schedule of a step on a simulated GPU, on which copies take a share of the time that can be seen.

    .cuda/venv/bin/python benchmarks/rehearse.py benchmarks/simulated_schedule.py docs/images/schedule.png

Eight layers of Llama 3 8B train with LoRA on one sequence of 32K tokens. Plain training would need
more than the limit of device memory. Times are those of a model of the device: see rehearse.py.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Final

import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy
from lightning_memo.callbacks import ScheduleRecorder
from lightning_memo.estimate.cluster import load_preset
from lightning_memo.models import CausalLM
from lightning_memo.reports.schedule import draw_schedule

_LAYERS: Final = 8
_TOKENS: Final = 2**15
_STEPS: Final = 6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the PNG file to write")
    options = parser.parse_args()
    config = {
        **load_preset("model", "llama3_8b")["config"],
        "num_hidden_layers": _LAYERS,
        "max_position_embeddings": _TOKENS,
    }
    module = CausalLM({"config": config, "lora": {"r": 16, "target_modules": "all-linear"}})
    ids = torch.arange(_TOKENS)[None] % config["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        recorder = ScheduleRecorder(step=_STEPS - 1, folder=folder)
        trainer = Trainer(
            accelerator="gpu", devices=1, precision="bf16-true", max_steps=_STEPS, logger=False, callbacks=[recorder],
            strategy=MemoStrategy(alpha=0.5, device_memory="40GiB"), enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, DataLoader([{"input_ids": ids, "labels": ids}] * _STEPS, batch_size=None))
    assert recorder.timeline is not None
    title = f"{torch.cuda.get_device_name()}, {_LAYERS} layers of Llama 3 8B, {_TOKENS:,} tokens"
    draw_schedule(recorder.timeline, options.output, title)


if __name__ == "__main__":
    main()
