"""Saved tensors that consist of other tensors, such as quantised ones, are offloaded part by part and restored."""

from __future__ import annotations

import pytest
import torch
from support.families import PlainBlock, PlainModel
from support.markers.slow import slow_if
from support.modes import BY_KIND
from support.trainer_harness import LanguageModel, fit, loader, plain
from support.wrapped_tensors import Opaque, Rounded, RoundedLinear
from torch import Tensor, nn

from lightning_memo import MemoStrategy
from lightning_memo.engine.saved_tensors.wrapper_subclasses import WrappedHandle, is_opaque, is_wrapped, plain_parts

pytestmark = pytest.mark.usefixtures("own_folder")


def module(kind: type[Tensor]) -> LanguageModel:
    def build() -> nn.Module:
        blocks = [PlainBlock() for _ in range(4)]
        for block in blocks:
            for linear in (block.qkv, block.mlp[0], block.mlp[2]):
                linear.__class__, linear.kind = RoundedLinear, kind
        return PlainModel(blocks)

    return LanguageModel(build)


CASES = [
    *((Rounded, settings) for settings in ({"alpha": 0.0}, {"alpha": 1.0}, {"alpha": 0.5}, {"test_mode": BY_KIND})),
    *((Opaque, settings) for settings in ({"alpha": 0.0}, {"alpha": 1.0})),  # has no form without values
]


@slow_if(lambda kind, settings: kind is Rounded and settings.get("alpha") in (0.0, 1.0))
@pytest.mark.parametrize(("kind", "settings"), CASES, ids=str)
def test_losses_are_those_of_plain_training(kind: type[Tensor], settings: dict[str, object]) -> None:
    budget = {"device_memory": "1100KiB"} if "test_mode" in settings else {}
    strategy = MemoStrategy(**settings, **budget)
    result, expected = fit(strategy, module(kind), max_steps=3), plain(module(kind), max_steps=3)
    exact = settings.get("alpha") in (0.0, 1.0)
    assert not result.plan.swap.plain
    assert result.losses == (expected.losses if exact else pytest.approx(expected.losses, abs=3e-6))
    assert result.held == [0, 0, 0]


def test_parts_are_what_is_planned() -> None:
    """Inputs in 8 bits take a quarter of the memory."""
    data = loader(tokens=24)  # not the width of a weight
    slots = [
        fit(MemoStrategy(alpha=1.0), made, data, max_steps=1).plan.swap.memory.slot
        for made in (module(Rounded), LanguageModel("block"))
    ]
    tokens, features, linears = 2 * 24, 32 + 32 + 128, 3
    saved = tokens * (3 * features - linears * 4)  # a byte instead of four, and a scale in fp32 for each row
    assert slots[0] <= slots[1] - saved + 2 * linears * 512  # where tensors begin


def test_a_tensor_is_taken_apart_and_made_again() -> None:
    t = Rounded.of(torch.randn(4, 6))
    assert is_wrapped(t) and not is_opaque(t) and plain_parts(t) == [t.data_int8, t.scale]
    made = WrappedHandle.of(t, lambda part: part.clone()).wrap(lambda part: part)
    assert type(made) is Rounded and torch.equal(made.real(), t.real())
    assert is_opaque(Opaque.of(torch.ones(2))) and not is_wrapped(torch.ones(2)) and not is_opaque(torch.ones(2))
