"""Training that keeps the gradients of all steps, and their errors against plain training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from typing_extensions import override

from lightning_memo import MemoStrategy
from support.families import PlainModel, make_batch
from support.harness import Batch, gradients_of
from support.trainer_harness import LanguageModel, batches, fit, plain_of

Gradients = dict[str, Tensor]

BOUND = 1e-5  # relative, for each parameter


class Recording(LanguageModel):
    """Keeps the gradients of all steps, which do not change the weights."""

    def __init__(self, family: Callable[[], nn.Module]) -> None:
        super().__init__(family, lr=0.0)
        self.gradients: list[dict[str, Tensor]] = []

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self))


def compare(
    build: Callable[[], nn.Module],
    settings: dict[str, Any],
    module: Callable[..., Recording] = Recording,
    steps: int = 3,
    tokens: int = 48,
) -> None:
    """Train with and without MemoStrategy, and compare the gradients of each step."""
    runs = []
    for strategy in (MemoStrategy(**settings), "auto"):
        run, data = module(build), [make_batch(2, tokens, seed=n) for n in range(steps)]
        torch.manual_seed(0)
        fit(strategy, run, batches(data), max_steps=steps)
        runs.append(run.gradients)
    assert len(runs[0]) == len(runs[1]) == steps
    for step, (mine, plain) in enumerate(zip(*runs, strict=True)):
        found = gradient_errors(mine, plain)
        assert max(found.values()) < BOUND, (step, found)


def blocks(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function that builds a model of three blocks."""
    return lambda: PlainModel([kind() for _ in range(3)])


def train(build: Callable[[], nn.Module], data: list[Batch], **settings: Any) -> LightningModule:
    module = Recording(build)
    fit(MemoStrategy(**settings), module, batches(data), max_steps=len(data))
    return module


def errors(module: LightningModule, expected: LightningModule) -> dict[str, float]:
    """Return the largest error of each parameter's gradient in any step, relative to its norm."""
    result: dict[str, float] = {}
    for mine, plain in zip(module.gradients, expected.gradients, strict=True):
        for name, error in gradient_errors(mine, plain).items():
            result[name] = max(error, result.get(name, 0.0))
    return result


def gradient_errors(actual: Gradients, expected: Gradients) -> dict[str, float]:
    """Return the error of each parameter's gradient, relative to its norm."""
    assert actual.keys() == expected.keys()
    assert all(gradient.isfinite().all() for gradient in actual.values())
    least = 1e-6 * float(sum(g.norm() ** 2 for g in expected.values()) ** 0.5)
    return {name: float((actual[name] - g).norm() / (g.norm() + least)) for name, g in expected.items()}


def plain_training(build: Callable[[], nn.Module], batch: Callable[[], Batch]) -> LightningModule:
    return plain_of(Recording, build, data=Repeated(batch), max_steps=2).module


class Repeated:
    """Two steps on a batch, equal to others of the same batch, so that references are trained once."""

    def __init__(self, batch: Callable[[], Batch]) -> None:
        self._batch = batch

    def __hash__(self) -> int:
        return hash(self._batch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Repeated) and self._batch is other._batch

    def __iter__(self) -> Any:
        return iter([self._batch(), self._batch()])
