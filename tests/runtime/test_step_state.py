"""What a step notes of the modules, between which and its forward users may change them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lightning_memo.runtime.step_state import StepState

CPU = torch.device("cpu")


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)))
    model[0].weight.requires_grad = False
    return model


def noted(model: nn.Module, steps: int) -> StepState:
    state = StepState(model, CPU, without=None)
    for _ in range(steps):
        state.note(again=False)
    return state


def add_buffer(model: nn.Module) -> Tensor:
    model[1].register_buffer("added", torch.zeros(2))
    return model[1].added


def add_module(model: nn.Module) -> Tensor:
    model[1].append(nn.Linear(3, 3).requires_grad_(False))
    return model[1][2].bias


def replace_parameter(model: nn.Module) -> Tensor:
    model[1][1].weight = nn.Parameter(torch.zeros(2, 2), requires_grad=False)
    return model[1][1].weight


def freeze(model: nn.Module) -> Tensor:
    model[1][1].bias.requires_grad = False
    return model[1][1].bias


CHANGES = {add_buffer: "Sequential.added", add_module: "Linear.bias", replace_parameter: "Linear.weight"}
CHANGES |= {freeze: "Linear.bias"}


@pytest.mark.parametrize(("change", "name"), CHANGES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_comes_between_steps_and_changes_in_the_forward_is_told(
    change: Callable[[nn.Module], Tensor], name: str
) -> None:
    model = build()
    state = noted(model, 3)
    new = change(model)
    state.note(again=False)
    assert not state.lost()
    with torch.no_grad():
        new.add_(1)
    assert state.lost() == name
    state.note(again=False)
    assert not state.lost()


@pytest.mark.parametrize("steps", range(3))
def test_other_buffers_of_the_same_names_are_restored(steps: int) -> None:
    model = build()
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
