"""A step that ran out of memory, and is run again, begins with the state of a step that did not fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.families import PlainBlock, PlainModel
from support.trainer_harness import LanguageModel, fit
from torch import Tensor, nn

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

GLOBAL = np.random.default_rng(1)
STEPS = 4
FAILURES = [(batch, where) for batch in (1, 2) for where in ("forward", "backward")]


class Watched(nn.LayerNorm):
    """Calls a function before each forward."""

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__(32)
        self._begin = begin

    def forward(self, input: Tensor) -> Tensor:
        self._begin()
        return super().forward(input)


class Failing(LanguageModel):
    """Runs out of device memory in the last layer, once.

    Args:
        build: Builds the model.
        batch: The batch in which it does.
        where: "forward" or "backward"; empty for nowhere.
    """

    def __init__(self, build: Callable[[], nn.Module], batch: int = 1, where: str = "") -> None:
        super().__init__(build)
        self._fails, self._now = {batch: where}, ""
        self.drawn: list[Any] = []
        norm = self.model.blocks[-1].norm2 = Watched(lambda: self._run_out("forward"))
        norm.weight.register_hook(lambda gradient: self._run_out("backward"))

    def _run_out(self, where: str) -> None:
        if self._now == where:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def on_train_start(self) -> None:
        super().on_train_start()
        random.seed(7)
        np.random.seed(7)
        GLOBAL.bit_generator.state = np.random.default_rng(1).bit_generator.state

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._now = self._fails.pop(batch_idx, "")
        loss = self.loss(batch)
        self._last = loss.item()
        return loss

    def on_train_batch_end(self, *args: object) -> None:
        self.losses.append(self._last)
        self.drawn.append((random.random(), np.random.random(), GLOBAL.random()))


def repeated(build: Callable[[], nn.Module], batch: int, where: str, **settings: Any) -> tuple[Failing, Failing]:
    """Train a model with a step that is run again, and plainly, and compare losses."""
    with pytest.warns(UserWarning, match="out of device memory"):
        result = fit(MemoStrategy(alpha=1.0, **settings), Failing(build, batch, where), max_steps=STEPS)
    found, expected = result.module, fit("auto", Failing(build), max_steps=STEPS).module
    assert found.losses == pytest.approx(expected.losses, abs=3e-6)
    assert len(found.losses) == STEPS
    return found, expected


class Drawing(PlainBlock):
    def __init__(self) -> None:
        super().__init__()
        self.of_module = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        drawn = random.random(), np.random.random(), GLOBAL.random(), self.of_module.random()
        return super().forward(x * (0.5 + sum(drawn) / 4))


@pytest.mark.parametrize(("batch", "where"), FAILURES)
def test_random_numbers_are_drawn_again(batch: int, where: str) -> None:
    """Those of Python and NumPy, and of generators that modules hold or their forwards name."""
    found, expected = repeated(lambda: PlainModel([Drawing() for _ in range(3)]), batch, where)
    assert found.drawn == expected.drawn
