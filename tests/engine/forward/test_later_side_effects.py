"""Layers that begin to do something in a later step, when they have been probed already."""

from __future__ import annotations

from typing import Any

import pytest
from support.families import PlainBlock, PlainModel
from support.trainer_harness import LanguageModel, fit, loader
from torch import Tensor
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


def test_losses_that_a_layer_begins_to_keep_elsewhere() -> None:
    with pytest.raises(ValueError, match="the loss depends on tensors of an earlier forward") as caught:
        fit(MemoStrategy(alpha=0.5), Counting(lambda: WithLosses([Keeping() for _ in range(3)])), loader(), max_steps=6)
    assert "\n" not in str(caught.value)
    assert "second time" in str(caught.value.__cause__)
