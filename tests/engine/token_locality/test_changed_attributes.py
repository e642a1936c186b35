"""Attributes that are changed while training: a layer that begins to mix tokens then is not cut any more."""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import setitem
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import PlainBlock, PlainModel, make_batch
from support.harness import EngineUnderTest, assert_close, loss_and_gradients
from support.markers.slow import slow_if
from torch import Tensor, nn

from lightning_memo.engine.modules import layer_classes
from lightning_memo.engine.modules.module_attributes import ModuleAttributes

BATCH = make_batch(2, 48)


class Config:
    def __init__(self) -> None:
        self.factor, self.shifts, self.steps, self.window = 0, False, 0, [1, 0]


def shifted(x: Tensor, factor: float) -> Tensor:
    return x + factor * F.pad(x[:, :-1], (0, 0, 1, 0))


def as_it_is(x: Tensor) -> Tensor:
    return x


class Switched(PlainBlock):
    """Adds each token to the next one if any of its attributes says so."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._shifts, self._factor, self.config, self.before = False, 0, config, as_it_is
        self.inner = nn.Identity()
        self._list, self._dict = [0, 1], {"factor": 0}
        self._steps = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        flags = self._shifts, self.config.shifts
        numbers = self._factor, self._list[0], self._dict["factor"], self.config.factor, self.config.window[1]
        if any(flags) or any(numbers):
            x = shifted(x, 0.5)
        return super().forward(self.inner(x))


def set_function(block: Switched, config: Config) -> None:
    block.before = functools.partial(shifted, factor=0.5)


def set_closure(block: Switched, config: Config) -> None:
    def made(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: shifted(x, factor) if factor else x

    block.before = made(0.5 if config.steps else 0)
    config.steps += 1


def set_inner(block: Switched, config: Config) -> None:
    block.inner.forward = functools.partial(shifted, factor=0.5)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Switched, Config], None]] = {
    "flag": lambda block, _: setattr(block, "_shifts", True),
    "number": lambda block, _: setattr(block, "_factor", 1),
    "item": lambda block, _: setitem(block._list, 0, 1),
    "key": lambda block, _: setitem(block._dict, "factor", 1),
    "flag of an object": lambda _, config: setattr(config, "shifts", True),
    "number of an object": lambda _, config: setattr(config, "factor", 1),
    "item of an object": lambda _, config: setitem(config.window, 1, 1),
    "function": set_function,
    "closure": set_closure,
    "forward of a part": set_inner,
}
OTHERS = ("item", "key", "number of an object", "item of an object")


@slow_if(lambda change, alone, case_id: (not alone and change is not set_closure) or case_id.endswith(OTHERS))
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("alone", [False, True], ids=["all layers", "one layer"])
def test_layers_that_begin_to_mix_tokens(change: Callable[[Switched, Config], None], alone: bool) -> None:
    torch.manual_seed(0)
    config = Config()
    layers = [Switched(config) for _ in range(4)]
    model = PlainModel(list(layers))
    with EngineUnderTest(model, check_slices=False) as under_test:
        under_test.profile_step(BATCH)
        under_test.load(0.5)
        assert under_test.engine.layer_classes.unsliceable == ""
        for _ in range(3):
            assert_close(under_test.step(BATCH), loss_and_gradients(model, BATCH))
        for layer in layers[:1] if alone else layers:
            change(layer, config)
        if change is set_closure:
            under_test.step(BATCH)
            change(layers[0], config)
        found = under_test.step(BATCH)
        assert "aten.slice computes along the tokens" in under_test.engine.layer_classes.unsliceable
    assert_close(found, loss_and_gradients(model, BATCH))


def test_a_number_that_counts_steps_hides_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    proofs: list[Any] = []
    prove = layer_classes.LocalityProofs.of

    def noted(*args: Any) -> Any:
        proofs.append(prove(*args))
        return proofs[-1]

    monkeypatch.setattr(layer_classes.LocalityProofs, "of", noted)
    config = Config()
    layers = [Switched(config) for _ in range(2)]
    with EngineUnderTest(model := PlainModel(list(layers)), check_slices=False) as under_test:
        under_test.profile_step(BATCH)
        under_test.load(0.5)
        for step in range(20):
            for layer in layers:
                layer._steps = step
            under_test.step(BATCH)
        assert under_test.engine.layer_classes.unsliceable == ""
        assert len(set(map(id, proofs))) == 2  # the second one does without the number
        layers[0]._factor = 1
        found = under_test.step(BATCH)
    assert_close(found, loss_and_gradients(model, BATCH))


def test_attributes_of_torch_and_long_containers_are_left_out() -> None:
    module = nn.Linear(2, 2)
    before = ModuleAttributes.of([("", module)])
    module._version_of_user = SimpleNamespace(steps=3)  # type: ignore[assignment]
    module.register_forward_hook(lambda *_: None)
    module._backward_hooks["x"] = 1  # type: ignore[assignment]
    assert ModuleAttributes.of([("", module)]).numbers == before.numbers
    module._past = list(range(1000))  # type: ignore[assignment]
    assert ModuleAttributes.of([("", module)]).numbers == before.numbers
    module._generator = torch.Generator()  # type: ignore[assignment]
    assert ModuleAttributes.of([("", module)]).inner[1:] == before.inner
    module._past = [1, True, "a", torch.ones(1)]  # type: ignore[assignment]
    assert ModuleAttributes.of([("", module)]).numbers == (*before.numbers, 1, True, "a")
