"""Random numbers that a training step draws after the model's call are the same on all stages of a pipeline."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.families import FAMILIES
from support.markers.slow import slow_if
from support.processes import run_in_processes
from support.trainer_harness import LanguageModel, make_trainer
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo import MemoStrategy

STEPS = 4  # the first one is profiled
Drawn = tuple[list[float], list[float]]


class Noisy(LanguageModel):
    """Draws numbers on the CPU and on the device after each call of the model, whose weights stay as they are."""

    def __init__(self, dropout: float) -> None:
        super().__init__(functools.partial(FAMILIES["llama_gqa"].build, attention_dropout=dropout), lr=0.0)
        self.noise: list[float] = []

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.noise += [torch.rand(()).item(), torch.rand((), device=self.device).item()]
        return self.keep(loss)


def _draw(dropout: float, settings: dict[str, Any]) -> Drawn:
    """Train on equal batches, and return the losses and the noise."""
    ids = torch.randint(0, 90, (4, 45), generator=torch.Generator().manual_seed(3))
    rows = [{"input_ids": row, "labels": row} for row in ids] * STEPS
    module = Noisy(dropout)
    trainer = make_trainer(
        MemoStrategy(alpha=0.5, **settings),
        devices=dist.get_world_size(), max_steps=STEPS, use_distributed_sampler=False,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(rows, batch_size=4))
    return module.losses, module.noise


SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "stages": (2, {"pipeline_layers": [1, 3]}),
    "blocks": (2, {"virtual_pipeline_size": 2}),
    "tp2": (4, {"tensor_parallel_size": 2, "sequence_parallel": False, "pipeline_layers": [1, 3]}),
}


@slow_if(lambda sizes: sizes != "stages")
@pytest.mark.parametrize("sizes", SIZES)
def test_stages_whose_layers_draw_other_amounts_draw_the_same_numbers(sizes: str) -> None:
    processes, settings = SIZES[sizes]
    drawn: list[Drawn] = run_in_processes(processes, _draw, 0.1, {"pipeline_parallel_size": 2} | settings)
    losses, noise = drawn[0]
    assert all(of_stage == (losses, noise) for of_stage in drawn)
    assert len(set(noise[::2])) == len(set(losses)) == STEPS  # dropout differs from step to step, too


@pytest.mark.slow
@pytest.mark.parametrize("sizes", SIZES)
def test_numbers_are_those_without_a_pipeline_if_the_model_draws_none(sizes: str) -> None:
    expected = run_in_processes(2, _draw, 0.0, {})[0][1]
    processes, settings = SIZES[sizes]
    for _, noise in run_in_processes(processes, _draw, 0.0, {"pipeline_parallel_size": 2} | settings):
        assert noise == expected
