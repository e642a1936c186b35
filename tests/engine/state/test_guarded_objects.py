"""Objects whose methods raise or count, which a walk over the state of a layer must not call."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch.nn.functional as F
from omegaconf import OmegaConf
from support.attention.recorded_training import compare
from support.families import VOCABULARY, PlainBlock, PlainModel
from support.markers.slow import slow_if
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from lightning_memo.utils.containers import copied, holds_other, refill

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.filterwarnings("error:.*as one slice")]

CALLED: list[str] = []
_METHODS = (
    *("__iter__", "__len__", "__bool__", "__contains__", "__getitem__", "__setitem__", "__eq__", "__reversed__"),
    *("keys", "values", "items", "get", "copy", "update", "clear", "extend", "append", "tobytes", "view"),
)


def guarded(base: type) -> type:
    """Return a class whose methods raise."""

    def refusing(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            CALLED.append(name)
            raise RuntimeError(f"{name} is called")

        return method

    own = {name: refusing(name) for name in _METHODS}
    return type(f"Guarded{base.__name__}", (base,), {**own, "__hash__": refusing("__hash__"), "__module__": __name__})


def guarded_ordered() -> Any:
    ordered = guarded(OrderedDict)()
    OrderedDict.__setitem__(ordered, "b", [0])
    OrderedDict.__setitem__(ordered, "a", None)
    OrderedDict.move_to_end(ordered, "b")
    return ordered


class Proxy:
    """Has no attributes outside of some context, not even a class."""

    def __init__(self) -> None:
        object.__setattr__(self, "inner", [0])

    def __getattribute__(self, name: str) -> Any:
        CALLED.append(name)
        raise RuntimeError(f"{name} is read outside of a context")


class Private(Proxy):
    """Has a class only."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name) if name == "__class__" else super().__getattribute__(name)


class Dynamic:
    """Computes its attributes, and has no others."""

    __slots__ = ("left",)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("it is not filled")

    @property
    def __class__(self) -> Any:
        raise RuntimeError("it is not filled")

    @property
    def value(self) -> Any:
        raise RuntimeError("it is not filled")


OBJECTS: dict[str, Callable[[], Any]] = {
    "dict": lambda: guarded(dict)(a=[0], b=None),
    "ordered": guarded_ordered,
    "list": lambda: guarded(list)([[0], "a"]),
    "set": lambda: guarded(set)(["a"]),
    "queue": lambda: guarded(deque)([[0]], maxlen=2),
    "tuple": lambda: guarded(tuple)([[0]]),
    "object": lambda: guarded(object)(),
    "proxy": Proxy,
    "private": Private,
    "dynamic": Dynamic,
    "missing": lambda: OmegaConf.create({"a": "???", "b": "${nowhere}", "c": ["???", {"d": "${missing:}"}]}),
}


class Ignoring(PlainBlock):
    """Does not look at what it gets."""

    def forward(self, x: Tensor, *others: Any) -> Tensor:
        return super().forward(x)


class Given(PlainModel):
    """Its blocks get an argument."""

    def __init__(self, argument: Any) -> None:
        super().__init__([Ignoring() for _ in range(3)])
        vars(self)["argument"] = argument

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:  # type: ignore[override]
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, vars(self)["argument"])
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


def as_attribute(value: Any) -> nn.Module:
    model = PlainModel([Ignoring() for _ in range(3)])
    for block in model.blocks:
        vars(block)["held"] = value
    return model


def as_argument(value: Any) -> nn.Module:
    return Given(value)


PLACES = [as_attribute, as_argument]
CASES = [
    (name, place) for place in PLACES for name in OBJECTS
    if place is not as_argument or name not in ("proxy", "dynamic")  # PyTorch itself asks arguments for their classes
]  # fmt: skip


@slow_if(lambda name, place, alpha: alpha != 0.5 or place is not as_attribute or name in ("queue", "set", "tuple"))
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("name", "place"), CASES)
def test_are_left_alone(name: str, place: Callable[[Any], nn.Module], alpha: float) -> None:
    value = OBJECTS[name]()
    CALLED.clear()
    compare(lambda: place(value), {"alpha": alpha})
    assert CALLED == []


@pytest.mark.parametrize("name", ["dict", "ordered", "list", "set", "queue"])
def test_contents_are_restored(name: str) -> None:
    value, empty = OBJECTS[name](), OBJECTS[name]()
    refill(empty, {})
    before = copied(value)
    assert holds_other(empty, before)
    assert not holds_other(value, before)
    refill(empty, before)
    assert not holds_other(empty, before)


class Counting(PlainBlock):
    def __init__(self) -> None:
        super().__init__()
        vars(self)["held"] = guarded(dict)(a=0)

    def forward(self, x: Tensor) -> Tensor:
        dict.update(self.held, {"a": dict.get(self.held, "a") + 1})
        return super().forward(x * (1 + dict.get(self.held, "a") / 10))


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_counts_in_such_a_dict(alpha: float) -> None:
    CALLED.clear()
    with pytest.warns(UserWarning, match=r"as one slice.*writes to Counting\.held\.a") if alpha else nullcontext():
        compare(lambda: PlainModel([Counting() for _ in range(3)]), {"alpha": alpha})
    assert CALLED == []
