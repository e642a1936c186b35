"""Layers that take another way for some numbers of tokens, which a proof for two numbers cannot meet."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention.recorded_training import BOUND, errors, plain_training, train
from support.families import PlainBlock, PlainModel, make_batch
from support.harness import Batch
from support.markers.slow import slow_if
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("own_folder")


class Fours(PlainBlock):
    """Adds means over blocks of four tokens if they divide the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if x.shape[1] % 4:
            return x
        return x + x.unflatten(1, (-1, 4)).mean(2, keepdim=True).expand(-1, -1, 4, -1).flatten(1, 2)


class WholeOnly(PlainBlock):
    """Mixes tokens if there are as many as in the batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.cumsum(1) / 10 if x.shape[1] == 48 else x


class SliceOnly(PlainBlock):
    """Mixes tokens if there are as many as in half of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.cumsum(1) / 10 if x.shape[1] == 24 else x


class Powers(PlainBlock):
    """Doubles its output for some lengths, found by numbers that are no integers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if math.log2(x.shape[1] / 3).is_integer() else 1)


class Filled(PlainBlock):
    """Adds the number of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.full((1, x.shape[1], 1), x.shape[1]) / 100


class Cut(PlainBlock):
    """Cuts a part of the gradient if four divides the sequence."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + (x if x.shape[1] % 4 else x.detach()) / 10


class Scaled(PlainBlock):
    """Scales attention by the number of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm1(x).unflatten(-1, (4, 8)).transpose(1, 2)
        scale = math.log(1 + x.shape[1]) / 8
        return x + F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, scale=scale).transpose(
            1, 2
        ).flatten(2)


def batch() -> Batch:
    return make_batch(2, 48)


@slow_if(lambda kind, settings: settings != {"alpha": 0.5} and kind is not Cut)
@pytest.mark.parametrize("settings", [{"alpha": 0.3}, {"alpha": 0.5}, {"alpha": 0.5, "slice_tokens": 12}])
@pytest.mark.parametrize("kind", [Fours, WholeOnly, SliceOnly, Powers, Filled, Cut, Scaled])
def test_gradients_are_those_of_plain_training(kind: type[nn.Module], settings: dict[str, Any]) -> None:
    def build() -> nn.Module:
        return PlainModel([kind() for _ in range(3)])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained = train(build, [batch(), batch()], check_slices=False, **settings)
    found = errors(trained, plain_training(build, batch))
    assert max(found.values()) < BOUND, found
    said = any("computes otherwise" in str(each.message) for each in caught)
    assert said == (kind is not SliceOnly or settings == {"alpha": 0.5})


def test_a_run_that_needs_slices_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Fours computes otherwise for 48 tokens: .*: set stream_from_host"):
        train(lambda: PlainModel([Fours()]), [batch()], alpha=0.5, slice_tokens=12, stream_from_host="hidden")


def test_a_slice_of_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SliceOnly computes otherwise for 24 tokens: .*, and these settings need"):
        train(
            lambda: PlainModel([SliceOnly() for _ in range(3)]),
            [batch()] * 2,
            alpha=0.5,
            slice_tokens=24,
            stream_from_host="hidden",
        )
