"""A program for `test_rehearsals.py`, in simulated time: trains layers of Llama 3 8B, and prints what a step takes.

Its arguments are the number of tokens and, as JSON, settings of `MemoStrategy`, or "checkpointing" or "plain". It may
be one rank of several.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from typing import Any

import emulated_device
import numpy as np
import simulated_time
import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy
from lightning_memo.estimate.cluster import load_preset
from lightning_memo.loss.attach_loss import attach_chunked_loss
from lightning_memo.models import CausalLM
from lightning_memo.parallel.local_tensors import local_part

TOKENS, METHOD = int(sys.argv[1]), json.loads(sys.argv[2])
# A few steps run by other plans: until host memory is locked, and with slices until keys and values are on the device.
RANKS = int(os.environ.get("WORLD_SIZE", "1"))
LAYERS, STEPS = 6, 7 if isinstance(METHOD, dict) else 3


class Module(CausalLM):
    def configure_model(self) -> None:
        if self.model is None:
            super().configure_model()
            if not isinstance(METHOD, dict):
                attach_chunked_loss(self.model)


class LastStep(Callback):
    """Time, memory and waits of the last step, in which nothing is compared and no checkpoint is written.

    Attributes:
        every: Time of each step.
        follows_plan: Whether the step ran by the plan.
    """

    def __init__(self) -> None:
        self.every: list[float] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.follows_plan = getattr(trainer.strategy, "follows_plan", True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        simulated_time.take_spans()
        self.begin, self.waits = simulated_time.now(), emulated_device.count("host_waits")

    def on_after_backward(self, *args: Any) -> None:
        self.waits = emulated_device.count("host_waits") - self.waits

    def on_train_batch_end(self, *args: Any) -> None:
        torch.cuda.synchronize()
        self.every.append(simulated_time.now() - self.begin)
        self.spans = simulated_time.take_spans()
        self.peak_bytes = torch.cuda.max_memory_allocated()


preset = load_preset("model", "llama3_8b")
config = {**preset["config"], "num_hidden_layers": LAYERS, "max_position_embeddings": TOKENS}
lora = {"r": 16, "target_modules": "all-linear"}
module = Module({"config": config, "lora": lora, "gradient_checkpointing": METHOD == "checkpointing"})
ids = torch.arange(TOKENS)[None] % config["vocab_size"]
last = LastStep()
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        accelerator="gpu", devices=RANKS, precision="bf16-true", max_steps=STEPS, logger=False, callbacks=[last],
        strategy=MemoStrategy(**METHOD) if isinstance(METHOD, dict) else "auto", enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, DataLoader([{"input_ids": ids, "labels": ids}] * STEPS, batch_size=None))
plan = getattr(trainer.strategy, "plan", None)
kinds = np.array(simulated_time.KINDS)[last.spans["kind"]]
length = last.spans["end"] - last.spans["start"]
result = {
    "seconds": last.every[-1],
    "every_step": last.every,
    "follows_plan": last.follows_plan,
    "peak_bytes": last.peak_bytes,
    "pinned_bytes": emulated_device.count("pinned_peak"),
    "host_waits": last.waits,
    "planned_bytes": None if plan is None else plan.device_bytes,
    "alpha": None if plan is None else plan.swap.alpha,
    "weights": sum(p.numel() for p in module.parameters()),
    "weight_bytes": sum(local_part(p).nbytes for p in module.parameters()),
    "kinds": {
        kind: [float(each[kinds == kind].sum()) for each in (length, last.spans["bytes"], last.spans["flops"])]
        for kind in simulated_time.KINDS
    },
}
sys.stdout.write("\n" + json.dumps(result) + "\n")
