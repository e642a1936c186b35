"""Trains a model in several processes that share the tokens of its batches, and in one, and compares the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from typing_extensions import override

from lightning_memo import MemoStrategy
from support.attention.recorded_training import BOUND, Recording, gradient_errors
from support.harness import Batch
from support.parallel_training import whole
from support.processes import run_in_processes
from support.trainer_harness import batches, fit

RING, ULYSSES = ({"context_parallel_size": 2, "ulysses_size": size} for size in (1, 2))


class WholeGradients(Recording):
    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append({name: whole(p.grad) for name, p in self.named_parameters() if p.grad is not None})


def train(
    model: Callable[[], nn.Module], data: Sequence[Batch], processes: int, accumulate: int, settings: dict[str, Any]
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Return the losses and the gradients of a training run in this process, one of several if `processes` > 1."""
    module: LightningModule = WholeGradients(model)
    strategy = MemoStrategy(**settings) if settings else "auto"
    fit(
        strategy, module, batches(data), max_steps=len(data) // accumulate, devices=processes,
        accumulate_grad_batches=accumulate, use_distributed_sampler=False,
    )  # fmt: skip
    return module.losses, module.gradients


def check(
    model: Callable[[], nn.Module],
    data: Sequence[Batch],
    settings: dict[str, Any],
    processes: int = 2,
    accumulate: int = 1,
) -> None:
    """Compare with plain training."""
    losses, gradients = train(model, data, 1, accumulate, {})
    arguments = (model, data, processes, accumulate, settings)
    parts = [train(*arguments)] if processes == 1 else run_in_processes(processes, train, *arguments)
    for step, expected in enumerate(losses):
        assert sum(part[0][step] for part in parts) / processes == pytest.approx(expected, rel=BOUND)
    for mine, expected in zip(parts[0][1], gradients, strict=True):
        found = gradient_errors(mine, expected)
        assert max(found.values()) < BOUND, found
