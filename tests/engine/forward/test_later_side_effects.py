"""Layers that begin to do something in a later step, when they have been probed already."""

from __future__ import annotations

from typing import Any

import pytest
from support.families import PlainBlock, PlainModel
from support.trainer_harness import LanguageModel, Result, fit, loader
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from typing_extensions import override

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")


class Counting(LanguageModel):
    """Counts steps in `Counting.step`, which layers read."""

    step = 0

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        Counting.step = batch_idx


LOSSES: list[Tensor] = []


class Keeping(PlainBlock):
    """Adds a loss to a list from the third step on."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if Counting.step >= 2:
            LOSSES.append(y.pow(2).mean())
        return y


class WithLosses(PlainModel):
    """Adds to its loss what layers have kept."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        out = super().forward(input_ids, labels)
        out.loss = out.loss + sum(LOSSES)
        LOSSES.clear()
        return out


@pytest.fixture(autouse=True)
def _begin() -> None:
    Counting.step = 0
    LOSSES.clear()


def trained(kind: type[nn.Module], steps: int = 6, model: type[PlainModel] = PlainModel, **settings: Any) -> Result:
    """Train three blocks."""
    return fit(MemoStrategy(**settings), Counting(lambda: model([kind() for _ in range(3)])), loader(), max_steps=steps)


def test_losses_that_a_layer_begins_to_keep_elsewhere() -> None:
    """The fourth step compares a layer with itself, and the loss gets what it keeps then."""
    with pytest.raises(ValueError, match="the loss depends on tensors of an earlier forward") as caught:
        trained(Keeping, model=WithLosses, alpha=0.5)
    assert "\n" not in str(caught.value)


class KeepingInput(PlainBlock):
    """Does so with a function of its input."""

    def forward(self, x: Tensor) -> Tensor:
        if Counting.step >= 2:
            LOSSES.append(x.pow(2).mean())
        return super().forward(x)


def test_losses_of_recomputations() -> None:
    with pytest.raises(ValueError, match="the loss depends on tensors of an earlier forward") as caught:
        trained(KeepingInput, model=WithLosses, alpha=0.0, check_slices=False)
    assert "\n" not in str(caught.value)
    assert "never differentiated" in str(caught.value.__cause__)


class KeepingPenalty(PlainBlock):
    """Does so with a function of a weight."""

    def forward(self, x: Tensor) -> Tensor:
        if Counting.step >= 2:
            LOSSES.append(self.out.weight.pow(2).mean())
        return super().forward(x)


def test_losses_of_comparisons() -> None:
    """The third step trains as it should, as nothing is recomputed. The fourth one compares a layer with itself."""
    with pytest.raises(ValueError, match="the loss depends on tensors of an earlier forward") as caught:
        trained(KeepingPenalty, model=WithLosses, alpha=1.0, slice_tokens=8)
    assert "never differentiated" in str(caught.value.__cause__)


NUMBERS = [0]


class LaterCounting(PlainBlock):
    """Counts its forwards in a global list from the third step on."""

    def forward(self, x: Tensor) -> Tensor:
        if Counting.step >= 2:
            NUMBERS[0] += 1
        return super().forward(x) * (1 + NUMBERS[0] / 100)


def test_counts_that_begin_later() -> None:
    """They are seen in the fourth step, which ends the run."""
    NUMBERS[0] = 0
    with (
        pytest.warns(UserWarning, match="LaterCounting does not compute in slices what it computes on all tokens"),
        pytest.raises(ValueError, match="LaterCounting gives another output for the same input") as caught,
    ):
        trained(LaterCounting, 4, alpha=0.5)
    assert "\n" not in str(caught.value)


class LaterWriting(PlainBlock):
    """Scales the output of its normalization through `.data` from the third step on, after autograd has saved it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        z = y.sigmoid()
        if Counting.step >= 2:
            z.data.mul_(0.5)
        return y + z


def test_writes_through_data_that_begin_later() -> None:
    """They are seen in the fourth step."""
    with pytest.raises(ValueError, match=r"LaterWriting writes through \.data into its input, or into") as caught:
        trained(LaterWriting, 4, alpha=0.5)
    assert "\n" not in str(caught.value)
    trained(LaterWriting, 2, alpha=0.5)
