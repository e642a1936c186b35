"""Layers in nested lists, of mixed classes, in several stacks, or called several times train like plain training."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.families import FAMILIES, PlainBlock, PlainModel, make_batch
from support.markers.slow import slow_if
from support.stacks import layer_stacks
from support.trainer_harness import LanguageModel, Result, batches, fit, listening, plain
from torch import Tensor, nn
from typing_extensions import override

from lightning_memo import MemoStrategy

_STEPS = 3
_BOUND = 1e-5
_HAS_NO_LAYERS = "nothing is swapped, because no backward went through the layers"


class Recorder(LanguageModel):
    """Keeps the gradients of every optimizer step."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__(build)
        self.gradients: list[dict[str, Tensor | None]] = []

    @override
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        copies = {name: None if p.grad is None else p.grad.clone() for name, p in self.named_parameters()}
        self.gradients.append(copies)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train(strategy: Any, build: Callable[[], nn.Module], data: list[dict[str, Tensor]], **trainer: Any) -> Result:
    steps = len(data) // trainer.get("accumulate_grad_batches", 1)
    return fit(strategy, Recorder(build), batches(data), max_steps=steps, **trainer)


def assert_as_plain(result: Result, expected: Result) -> None:
    """Assert that the gradients of every parameter are plain training's, and that no slot is held."""
    assert set(result.held) == {0}
    assert len(result.module.gradients) == len(expected.module.gradients)
    for mine, plains in zip(result.module.gradients, expected.module.gradients, strict=True):
        largest = max(g.norm() for g in plains.values() if g is not None)
        for name, gradient in plains.items():
            if gradient is None:
                assert mine[name] is None, name
            else:  # the gradients of key biases are zero up to rounding
                bound = _BOUND * max(gradient.norm(), 1e-3 * largest)
                assert (mine[name] - gradient).norm() <= bound, name


def rows(tokens: int = 32) -> list[dict[str, Tensor]]:
    return [make_batch(2, tokens, seed=seed) for seed in range(_STEPS)]


def translations(tokens: int = 24) -> list[dict[str, Tensor]]:
    """Batches for an encoder and a decoder."""
    return [
        {"input_ids": make_batch(2, tokens, seed=n)["input_ids"], "labels": make_batch(2, tokens, seed=n + 9)["labels"]}
        for n in range(_STEPS)
    ]


def images(*lengths: int) -> list[dict[str, Tensor]]:
    return [layer_stacks.llava_batch(tokens, seed) for seed, tokens in enumerate(lengths)]


# A model, its batches, the layer calls of a step, and whether layers can be cut into slices.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list[dict[str, Tensor]]], int, bool]] = {
    "nested lists": (layer_stacks.nested, rows, 6, True),
    "list of Sequentials": (layer_stacks.stages, rows, 4, True),
    "mixed classes": (layer_stacks.mixed, rows, 4, True),
    "Sequential": (layer_stacks.sequential, rows, 4, True),
    "ModuleDict": (layer_stacks.by_name, rows, 4, True),
    "one layer, many calls": (layer_stacks.repeated, rows, 5, True),
    "one layer": (functools.partial(FAMILIES["block"].build, num_hidden_layers=1), rows, 1, True),
    "ALBERT": (layer_stacks.albert, rows, 5, True),
    "Jamba": (layer_stacks.jamba, rows, 4, False),
    "XLM": (layer_stacks.xlm, rows, 8, False),
    "BART": (layer_stacks.bart, translations, 6, False),
    "LLaVA": (layer_stacks.llava, lambda: images(8, 8, 8), 8, True),
}


@slow_if(lambda name, alpha: alpha != 0.5 or name in ("list of Sequentials", "ModuleDict", "XLM", "Sequential"))
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_stacks(name: str, alpha: float) -> None:
    """Gradients are plain training's; alpha is a fraction of the layer calls where layers cannot be cut."""
    build, make, calls, sliceable = MODELS[name]
    data = make()
    result = train(MemoStrategy(alpha=alpha), build, data)
    assert (result.plan.swap.plain, result.plan.swap.calls) == (False, calls)
    assert (len(result.plan.swap.storage.calls) > 1) == (alpha == 0.5 and not sliceable)
    assert_as_plain(result, train("auto", build, data))


@pytest.mark.slow
@pytest.mark.parametrize("alpha", ["auto", 0.5, 1.0])
def test_stacks_of_different_lengths(alpha: float | str) -> None:
    """The vision tower gets 17 tokens, and the language model a different number in each batch, also fewer."""
    data = images(10, 20, 5, 30, 30, 3, 25)
    result = train(MemoStrategy(alpha=alpha), layer_stacks.llava, data)
    assert result.plan.swap.calls == 8
    assert (result.plan.costs.batch, result.plan.costs.tokens) == (2, 48)  # those of the largest call
    assert_as_plain(result, train("auto", layer_stacks.llava, data))


@slow_if(lambda accumulate: accumulate == 2)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    ("build", "make"),
    [
        (layer_stacks.last_unused, lambda: [*rows(), *rows()[:1]]),
        (functools.partial(layer_stacks.llava, feature_layer=-2), lambda: images(8, 8, 8, 8)),
    ],
    ids=["block", "LLaVA"],
)
def test_a_layer_without_backward(build: Callable[[], nn.Module], make: Any, accumulate: int) -> None:
    """A layer whose output the loss does not use does not keep a plan from being made."""
    data = make()
    result = train(MemoStrategy(alpha=0.5), build, data, accumulate_grad_batches=accumulate)
    assert result.plan.swap.alpha == 0.5
    assert_as_plain(result, train("auto", build, data, accumulate_grad_batches=accumulate))


SMALL_TOWER = functools.partial(layer_stacks.llava, vision_layers=1)


@pytest.mark.parametrize(
    ("build", "settings", "calls", "words"),
    [
        (SMALL_TOWER, {}, 4, ("language_model.layers are swapped", "vision_tower.encoder.layers are not", "small")),
        (layer_stacks.llava, {"slice_tokens": 8}, 4, ("encoder.layers are not", "these settings swap one stack")),
        (layer_stacks.llava, {"layers": "vision_tower.encoder.layers"}, 4, ()),
        (SMALL_TOWER, {"layers": ["vision_tower.encoder.layers", "language_model.layers"]}, 5, ()),
        (layer_stacks.llava, {}, 8, ()),
    ],
    ids=["small stack", "slices on the host", "one name", "two names", "all"],
)
def test_chosen_stacks(build: Callable[[], nn.Module], settings: dict[str, Any], calls: int, words: Any) -> None:
    """Stacks that are not swapped are named in one line, unless the user named the others."""
    data = images(8, 8)
    with listening() as heard:
        result = train(MemoStrategy(alpha=0.5, **settings), build, data)
    lines = [line for line in heard if "are swapped, and those of" in line]
    assert len(lines) == (1 if words else 0)
    assert all(word in line and "layers=" in line for line in lines for word in words)
    assert result.plan.swap.calls == calls
    assert_as_plain(result, train("auto", build, data))


def _frozen() -> nn.Module:
    model = PlainModel([PlainBlock() for _ in range(3)])
    model.embed.requires_grad_(False)
    model.blocks.requires_grad_(False)
    return model


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.5}], ids=str)
@pytest.mark.parametrize("build", [layer_stacks.never_called, _frozen], ids=["never called", "frozen"])
def test_nothing_to_swap(build: Callable[[], nn.Module], settings: dict[str, Any]) -> None:
    """If no layer gets a gradient, training is plain, and one line says so and what to do."""
    with pytest.warns(UserWarning, match=_HAS_NO_LAYERS) as caught:
        result = train(MemoStrategy(**settings), build, rows())
    (line,) = (str(w.message) for w in caught if _HAS_NO_LAYERS in str(w.message))
    assert "\n" not in line
    assert "layers=" in line
    assert result.plan is None
    expected = plain(Recorder(build), batches(rows()), max_steps=_STEPS)
    assert result.losses == expected.losses
    assert_as_plain(result, expected)


def test_several_names_with_settings_for_one_stack() -> None:
    """Several stacks are refused where the settings work on one."""
    names = ["language_model.layers", "vision_tower.encoder.layers"]
    with pytest.raises(ValueError, match=r"names several stacks, but .*: give one name") as caught:
        train(MemoStrategy(layers=names, slice_tokens=8), layer_stacks.llava, images(8))
    assert "\n" not in str(caught.value)


def _narrowing() -> nn.Module:
    halves = nn.ModuleList(nn.Sequential(nn.Linear(size, size // 2), nn.ReLU()) for size in (32, 16))
    return layer_stacks.StackedModel(
        halves, lambda parts, x: nn.functional.pad(layer_stacks.in_turn(parts, x), (0, 24))
    )


def test_layers_that_change_the_shape() -> None:
    """Modules that do not keep the hidden size are refused in one line."""
    message = r"Sequential returned Tensor with \[.*\] for an input of shape .* hidden states of the same shape"
    with pytest.raises(ValueError, match=message) as caught:
        train(MemoStrategy(), _narrowing, rows())
    assert "\n" not in str(caught.value)
