"""The names of a model's tensors are not looked for in each step, and a step that failed tells whether others came."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from lightning_memo.engine.state.other_generators import OtherGenerators
from lightning_memo.runtime.step_state import StepState


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    model[0].weight.requires_grad = False
    return model


def noted(model: nn.Module, steps: int) -> StepState:
    state = StepState(model, torch.device("cpu"), without=None)
    for _ in range(steps):
        state.note(again=False)
    return state


def add_buffer(model: nn.Module) -> None:
    model[1].register_buffer("added", torch.zeros(2))


def add_module(model: nn.Module) -> None:
    model[1].append(nn.Linear(3, 3))


def replace_parameter(model: nn.Module) -> None:
    model[1][1].weight = nn.Parameter(torch.zeros(2, 2))


def freeze(model: nn.Module) -> None:
    model[1][1].bias.requires_grad = False


CHANGES = {add_buffer: "Sequential.added", add_module: "Linear.weight", replace_parameter: "Linear.weight"}
CHANGES |= {freeze: "Linear.bias"}


@pytest.mark.parametrize(("change", "name"), CHANGES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_came_while_nobody_looked_is_told(change: Callable[[nn.Module], None], name: str) -> None:
    model = build()
    state = noted(model, 3)
    assert not state.lost()
    change(model)
    told = []
    for _ in range(10):
        state.note(again=False)
        told.append(state.lost())
    assert told[0] == name and not told[-1] and set(told) == {name, ""}


@pytest.mark.parametrize("steps", range(12))
def test_other_buffers_of_the_same_names_are_restored(steps: int) -> None:
    model = build()
    noted(model, 0)
    state = noted(model, 1)
    norm = model[1][0]
    for step in range(steps):
        norm.running_mean = torch.full((2,), float(step))
        state.note(again=False)
    kept = norm.running_mean
    before = kept.clone()
    kept.add_(1)
    norm.running_mean = torch.full((2,), -1.0)
    assert not state.lost()
    state.restore()
    assert norm.running_mean is kept and torch.equal(kept, before)


def test_gradients_of_all_parameters_are_seen() -> None:
    model = build()
    state = noted(model, 3)
    assert not state.holds_gradients
    model[1][1].bias.grad = torch.zeros(2)
    assert state.holds_gradients


@pytest.mark.parametrize("draws", range(5))
def test_gaussian_numbers_come_in_pairs(draws: int) -> None:
    """The second one of NumPy's and of Python's leaves the numbers of the generator as they are."""
    np.random.seed(3)
    random.seed(3)
    generators = OtherGenerators([np.random.mtrand._rand, random._inst])
    for _ in range(draws):
        generators.note()
        np.random.randn()
        random.gauss()
    generators.note()
    expected = [(np.random.randn(), random.gauss()) for _ in range(3)]
    generators.restore()
    assert [(np.random.randn(), random.gauss()) for _ in range(3)] == expected


def test_another_bit_generator() -> None:
    generator = np.random.RandomState(np.random.PCG64(3))
    generators = OtherGenerators([generator])
    for _ in range(3):
        generator.random_sample()
        generators.note()
    expected = generator.random_sample()
    generators.restore()
    assert generator.random_sample() == expected
