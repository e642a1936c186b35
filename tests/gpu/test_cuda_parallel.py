"""The code of several processes on NCCL, with the single process that one GPU allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from support.markers.slow import slow_if
from support.samples.cuda import Batch, make_batch, make_model
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy
from lightning_memo.engine import TestMode

STEPS = 4


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = make_model("cpu", torch.float32)
        self.losses: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def train(strategy: Any, precision: str) -> list[float]:
    batch = {name: t[0] for name, t in make_batch("cpu").items()}
    module = Module()
    trainer = Trainer(
        strategy=strategy, accelerator="cuda", devices=1, precision=precision, max_steps=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0,
    )  # fmt: skip
    trainer.fit(module, DataLoader([batch] * STEPS, batch_size=2))
    return module.losses


@slow_if(lambda case_id: case_id in ("zero1-bf16-mixed", "zero2-bf16-true", "offload-bf16-true"))
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "settings",
    [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"zero_stage": 3, "offload_state": True}],
    ids=["zero1", "zero2", "zero3", "offload"],
)
def test_one_process_on_nccl(settings: dict[str, Any], precision: str) -> None:
    careful = {"alpha": 0.5, "test_mode": TestMode(seed=1, longest_delay_seconds=0.001)}
    losses = train(MemoStrategy(**settings, **careful), precision)
    assert dist.is_initialized() and "nccl" in dist.get_backend()
    assert len(losses) == STEPS
    assert losses == pytest.approx(train("auto", precision), rel=1e-2)  # bf16 keeps 8 bits
    assert losses[-1] < losses[0]
