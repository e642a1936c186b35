"""Validation, test and prediction in several processes: the same losses as in one, before, in and after a fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from parallel_training import LR, Run, Texts
from processes import run_in_processes
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_harness import LanguageModel, make_trainer
from typing_extensions import override

from lightning_memo import MemoStrategy

RUN = Run(tokens=45, steps=2)

CONFIGURATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2 ring": (2, {"context_parallel_size": 2}),
    "cp2 ulysses": (2, {"context_parallel_size": 2, "context_parallel_method": "ulysses"}),
    "tp2": (2, {"tensor_parallel_size": 2, "sequence_parallel": False}),
    "tp2+sp": (2, {"tensor_parallel_size": 2}),
    "dp2 zero3": (2, {"zero_stage": 3}),
    "cp2 x tp2+sp zero3": (4, {"context_parallel_size": 2, "tensor_parallel_size": 2, "zero_stage": 3}),
}


class Evaluated(LanguageModel):
    """Logs losses as the mean over all processes, and predicts the loss of each batch."""

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True, batch_size=1)

    @override
    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True, batch_size=1)


def _loader() -> DataLoader[dict[str, Tensor]]:
    return DataLoader(Texts(RUN), batch_size=RUN.batch // 2)


def _evaluate(settings: dict[str, Any]) -> dict[str, float]:
    module = Evaluated(RUN.family, lr=LR)
    strategy = MemoStrategy(**({"alpha": 0.5, "plan_memory": False} | settings))
    trainer: Trainer = make_trainer(
        strategy, devices=dist.get_world_size(), max_steps=2, num_sanity_val_steps=1, val_check_interval=1
    )
    losses = {"before": trainer.validate(module, _loader(), verbose=False)[0]["val_loss"]}
    torch.manual_seed(1)
    trainer.fit(module, _loader(), _loader())
    losses["in the fit"] = trainer.callback_metrics["val_loss"].item()
    losses["after"] = trainer.test(module, _loader(), verbose=False)[0]["test_loss"]
    predictions = trainer.predict(module, _loader())
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, float(torch.stack(predictions).mean()))
    losses["predicted"] = sum(gathered) / len(gathered)
    return losses


@torch.no_grad()
def _loss_of(module: LanguageModel) -> float:
    return sum(float(module.loss(batch)) for batch in _loader()) / len(_loader())


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_losses_of_all_stages(configuration: str) -> None:
    size, settings = CONFIGURATIONS[configuration]
    losses = run_in_processes(size, _evaluate, settings)
    assert all(of_rank == losses[0] for of_rank in losses)
    # Batches of two data-parallel processes are weighted by their tokens together, those of one process one by one.
    rel = 2e-3 if configuration.startswith("dp2") else 1e-6
    assert losses[0]["before"] == pytest.approx(_loss_of(LanguageModel(RUN.family)), rel=rel)
    assert losses[0]["before"] != losses[0]["after"]
    assert losses[0]["after"] == pytest.approx(losses[0]["in the fit"], rel=1e-6)
    assert losses[0]["after"] == pytest.approx(losses[0]["predicted"], rel=1e-6)
