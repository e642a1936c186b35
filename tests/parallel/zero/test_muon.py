"""Muon orthogonalises whole matrices, of which processes have shards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.families import FAMILIES, make_batch
from support.markers.slow import slow_if
from support.parallel_training import whole
from support.processes import run_in_processes
from support.trainer_harness import LanguageModel, make_trainer
from torch import Tensor
from torch.optim import Muon
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy

# Of a step. Muon multiplies in bf16, and rounds products of shards in other places: the largest error here is 0.13.
# Gradients that differ by 1e-6 change a step by 0.05; orthogonalising each half of a matrix by itself, by 0.42 to 0.75.
BOUND = 0.2


class ByMuon(LanguageModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        for name, p in self.named_parameters():
            p.requires_grad_(p.ndim == 2 and "embed" not in name and "lm_head" not in name)
        return Muon([p for p in self.parameters() if p.requires_grad], lr=0.02)


def train(settings: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights after two steps."""
    module = ByMuon(FAMILIES["llama_gqa"].build, lr=0.02)
    alone = not settings
    strategy = "auto" if alone else MemoStrategy(**settings)
    trainer = make_trainer(strategy, devices=1 if alone else dist.get_world_size(), max_steps=2)
    batch = make_batch(1, 48)
    trainer.fit(module, DataLoader([{name: t[0] for name, t in batch.items()}] * 8, batch_size=2))
    return {name: whole(p) for name, p in module.named_parameters() if p.requires_grad}


@slow_if(lambda settings: settings != {"zero_stage": 2})
@pytest.mark.parametrize("settings", [*({"zero_stage": stage} for stage in range(4)), {"tensor_parallel_size": 2}])
def test_weights_are_those_of_one_process(settings: dict[str, Any]) -> None:
    before = dict(ByMuon(FAMILIES["llama_gqa"].build, lr=0.02).named_parameters())
    expected = train({})
    for weights in run_in_processes(2, train, settings):
        assert weights.keys() == expected.keys()
        for name, weight in weights.items():
            step = (expected[name] - before[name].detach()).norm()
            assert (weight - expected[name]).norm() < BOUND * step, name
