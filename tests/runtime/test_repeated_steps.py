"""A step that ran out of memory, and is run again, begins with the state of a step that did not fail."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.attention.recorded_training import BOUND, gradient_errors
from support.families import PlainBlock, PlainModel
from support.harness import gradients_of
from support.markers.slow import slow_if
from support.trainer_harness import LanguageModel, fit
from torch import Tensor, nn

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

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
        super().__init__(build, lr=0.0)  # Adam makes steps of the rounding of gradients that are zero
        self._fails, self._now = {batch: where}, ""
        self.drawn: list[Any] = []
        self.gradients: list[dict[str, Tensor]] = []
        norm = self.model.blocks[-1].norm2 = Watched(lambda: self._run_out("forward"))
        norm.weight.register_hook(lambda gradient: self._run_out("backward"))

    def _run_out(self, where: str) -> None:
        if self._now == where:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def on_train_start(self) -> None:
        super().on_train_start()
        random.seed(7)
        np.random.seed(7)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._now = self._fails.pop(batch_idx, "")
        loss = self.loss(batch)
        self._last = loss.item()
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(gradients_of(self))

    def on_train_batch_end(self, *args: object) -> None:
        self.losses.append(self._last)
        self.drawn.append((random.random(), np.random.random()))


def repeated(build: Callable[[], nn.Module], batch: int, where: str, **settings: Any) -> tuple[Failing, Failing]:
    """Train a model with a step that is run again, and plainly, and compare losses and gradients."""
    with pytest.warns(UserWarning, match="out of device memory"):
        result = fit(MemoStrategy(alpha=1.0, **settings), Failing(build, batch, where), max_steps=STEPS)
    found, expected = result.module, fit("auto", Failing(build), max_steps=STEPS).module
    assert found.losses == pytest.approx(expected.losses, abs=3e-6)
    assert len(found.gradients) == len(expected.gradients) == STEPS
    for mine, plain in zip(found.gradients, expected.gradients, strict=True):
        assert max(gradient_errors(mine, plain).values()) < BOUND
    return found, expected


class Drawing(PlainBlock):
    def __init__(self) -> None:
        super().__init__()
        self.of_module, self.of_numpy = random.Random(3), np.random.default_rng(1)

    def forward(self, x: Tensor) -> Tensor:
        drawn = random.random(), np.random.random(), self.of_numpy.random(), self.of_module.random()
        return super().forward(x * (0.5 + sum(drawn) / 4))


@slow_if(lambda batch, where: (batch == 1) != (where == "forward"))
@pytest.mark.parametrize(("batch", "where"), FAILURES)
def test_random_numbers_are_drawn_again(batch: int, where: str) -> None:
    """Those of Python and NumPy, and of generators that modules hold."""
    found, expected = repeated(lambda: PlainModel([Drawing() for _ in range(3)]), batch, where)
    assert found.drawn == expected.drawn


class Counting(PlainBlock):
    """Has running statistics, counts in a buffer, in numbers and in tensors, and depends on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("scale", torch.ones(32))
        self.calls, self.seen, self.history, self.total = 0, torch.zeros(()), [0], torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "first"):
            self.first = 0
        self.first += 1
        self.calls += 1
        self.history.append(self.calls)
        self.seen += 1
        self.total = self.total + x.detach().mean()
        with torch.no_grad():
            self.count += 1
            self.get_buffer("count").mul_(1.25)
        x = x + self.norm(x.transpose(1, 2)).transpose(1, 2)
        return super().forward(x * (1 + 0.1 * self.count)) * (
            1 + 0.1 * self.seen + 0.1 * len(self.history) + self.total
        )


class Around(PlainModel):
    """Counts outside of its layers."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__([kind() for _ in range(3)])
        self.embed = nn.Sequential(self.embed, Outside())


class Outside(Counting):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale *= 0.9
        return super().forward(x) * self.scale


def held_by(module: nn.Module) -> list[dict[str, Any]]:
    return [
        {
            "calls": each.calls, "first": each.first, "history": each.history, "seen": each.seen.item(),
            "count": each.count.item(), "batches": each.norm.num_batches_tracked.item(),
        }
        for each in module.modules() if isinstance(each, Counting)
    ]  # fmt: skip


@slow_if(lambda case_id: case_id not in ("1-forward-Counting", "2-backward-PlainBlock"))
@pytest.mark.parametrize("kind", [PlainBlock, Counting])
@pytest.mark.parametrize(("batch", "where"), FAILURES)
def test_what_modules_hold_is_as_before(kind: type[PlainBlock], batch: int, where: str) -> None:
    """Statistics and counters are updated once, in layers and outside of them."""
    found, expected = repeated(lambda: Around(kind), batch, where)
    assert held_by(found) == held_by(expected)
    assert len(held_by(found)) == (1 if kind is PlainBlock else 4)
    for (name, mine), (_, plain) in zip(found.state_dict().items(), expected.state_dict().items(), strict=True):
        assert torch.allclose(mine, plain, atol=1e-5), name


class Large(PlainModel):
    def __init__(self) -> None:
        super().__init__([PlainBlock() for _ in range(3)])
        self.register_buffer("codes", torch.zeros(2**16 + 1))

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        self.codes += 1
        return super().forward(input_ids, labels)


def test_large_buffers_that_change() -> None:
    """There is no copy of them: the run ends with one line."""
    with pytest.raises(
        torch.OutOfMemoryError, match=r"it has changed Large.codes, of which there is no copy"
    ) as caught:
        fit(MemoStrategy(alpha=1.0), Failing(Large, 1, "forward"), max_steps=STEPS)
    assert "\n" not in str(caught.value)


class Scaling(nn.Module):
    """Changes a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale *= 0.9
        return x * self.scale


def test_parameters_that_are_not_trained_and_change() -> None:
    """Nor is there a copy of them."""

    def build() -> nn.Module:
        model = PlainModel([PlainBlock() for _ in range(3)])
        model.embed = nn.Sequential(model.embed, Scaling())
        return model

    with pytest.raises(torch.OutOfMemoryError, match=r"it has changed Scaling.scale, of which there is no copy"):
        fit(MemoStrategy(alpha=1.0), Failing(build, *FAILURES[0]), max_steps=STEPS)


class Logging(Failing):
    """Logs the mean, the sum and the largest of some values over an epoch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        value = 1.0 + batch_idx
        self.log("mean", loss, on_step=True, on_epoch=True, batch_size=2)
        self.log("sum", value, on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("largest", -value if self._now else value, on_step=False, on_epoch=True, reduce_fx="max")
        if self._now:
            self.log("only at first", value)
        return loss


@slow_if(lambda batch: batch == 0)
@pytest.mark.parametrize("batch", [0, 2])
def test_what_a_step_logs_counts_once(batch: int) -> None:
    def build() -> nn.Module:
        return PlainModel([PlainBlock() for _ in range(3)])

    plain = fit("auto", Logging(build), max_steps=STEPS).trainer
    with pytest.warns(UserWarning, match="out of device memory"):
        found = fit(MemoStrategy(alpha=1.0), Logging(build, batch, "backward"), max_steps=STEPS).trainer
    logged, expected = found.logged_metrics, plain.logged_metrics
    assert logged.keys() == expected.keys()
    for key, value in expected.items():
        assert float(logged[key]) == pytest.approx(float(value), rel=1e-6), key
