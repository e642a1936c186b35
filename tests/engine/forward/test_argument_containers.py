"""Hidden states that models pass in tuples, dicts and lists."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from support.attention.recorded_training import compare
from support.families import VOCABULARY, PlainBlock, PlainModel
from support.markers.slow import slow_if
from support.trainer_harness import LanguageModel, fit, loader, plain
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from lightning_memo import MemoStrategy
from lightning_memo.engine.layers.argument_containers import unpack_container_arguments

pytestmark = pytest.mark.usefixtures("own_folder")

SETTINGS: list[dict[str, Any]] = [
    *({"alpha": alpha} for alpha in (0.0, 0.5, 1.0)),
    {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "hidden"},
]


class Packing(PlainModel):
    """Passes hidden states in a container, which it reads again at the end."""

    def __init__(
        self, blocks: Sequence[nn.Module], pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        super().__init__(blocks)
        self.pack, self.unpack = pack, unpack

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        given = states = self.pack(self.embed(input_ids))
        for block in self.blocks:
            states = block(states)
        x = self.unpack(given if isinstance(self.blocks[0], Writing) else states)
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


class Pairs(PlainBlock):
    """Two streams."""

    def forward(self, states: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, beside = states
        return super().forward(x), beside + self.out(x)


class Named(NamedTuple):
    angles: Tensor
    hidden: Tensor


class Rotating(PlainBlock):
    def forward(self, states: Named) -> Named:
        return states._replace(hidden=super().forward(states.hidden) * states.angles.cos().mean(-1, keepdim=True))


class InDict(PlainBlock):
    def forward(self, states: dict[str, Any]) -> dict[str, Any]:
        return {**states, "hidden": super().forward(states["hidden"]) * states["scale"]}


class Writing(PlainBlock):
    """Writes into the dict that it gets."""

    def forward(self, states: dict[str, Any]) -> Any:
        states["hidden"] = super().forward(states["hidden"])
        states["last"] = states["hidden"].sin()
        return states


class InList(PlainBlock):
    def forward(self, states: list[Tensor]) -> list[Tensor]:
        return [super().forward(states[0])]


def rotating(x: Tensor) -> Named:
    return Named(torch.arange(x.shape[1])[None, :, None].expand(1, -1, 8) * 0.1, x)


def in_dict(x: Tensor) -> dict[str, Any]:
    return {"positions": torch.arange(x.shape[1]), "hidden": x, "scale": 2.0}


def hidden(states: Any) -> Tensor:
    return states["hidden"] + states.get("last", 0.0)


CASES: dict[str, Callable[[], nn.Module]] = {
    "tuple": lambda: Packing([Pairs() for _ in range(3)], lambda x: (x, 0.5 * x), sum),
    "named tuple": lambda: Packing([Rotating() for _ in range(3)], rotating, lambda states: states.hidden),
    "dict": lambda: Packing([InDict() for _ in range(3)], in_dict, hidden),
    "written dict": lambda: Packing([Writing() for _ in range(3)], in_dict, hidden),
    "list": lambda: Packing([InList() for _ in range(3)], lambda x: [x], lambda states: states[0]),
}


@slow_if(lambda case, settings: settings != {"alpha": 0.5} and case != "written dict")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("error:.*layers run as one slice")
def test_gradients_are_those_of_plain_training(case: str, settings: dict[str, Any]) -> None:
    compare(CASES[case], settings)


def test_plain_steps_and_validation() -> None:
    settings = {"max_steps": 2, "val_check_interval": 1, "limit_val_batches": 1}
    result = fit(MemoStrategy(), LanguageModel(CASES["written dict"]), loader(), loader(), **settings)
    expected = plain(LanguageModel(CASES["written dict"]), loader(), val_data=loader(), **settings)
    assert result.losses == expected.losses and result.plan.swap.plain


@pytest.mark.parametrize("case", ["dict", "written dict", "list"])
def test_hidden_states_leave_the_device(case: str) -> None:
    """What the engine keeps of a call until its backward does not hold the container."""
    kept: list[Any] = []

    def run(layer: nn.Module, forward: Callable[..., Any], x: Tensor, *rest: Any) -> Any:
        kept.append(forward)
        return forward(x, *rest)

    model = CASES[case]()
    x = torch.randn(2, 8, 32, requires_grad=True).exp()
    seen, states = weakref.ref(x), model.pack(x)
    del x
    with torch.no_grad():
        output = unpack_container_arguments(run)(model.blocks[0], model.blocks[0].forward, states)
    assert (output is states) == (case == "written dict")
    del output, states
    assert kept and seen() is None


class WritingAside(PlainBlock):
    def forward(self, states: dict[str, Any]) -> dict[str, Any]:
        states["seen"] = True
        return {**states, "hidden": super().forward(states["hidden"])}


class ReturningNothing(Writing):
    def forward(self, states: dict[str, Any]) -> None:
        super().forward(states)


@pytest.mark.parametrize("kind", [WritingAside, ReturningNothing])
def test_containers_that_are_written_besides_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} writes into the dict in which it gets its hidden") as caught:
        compare(lambda: Packing([kind() for _ in range(3)], in_dict, hidden), {"alpha": 0.0})
    assert "\n" not in str(caught.value)


class Wrapped(PlainBlock):
    def forward(self, states: Any) -> Any:
        raise AssertionError


def test_other_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="Wrapped got object as its first argument: layers get their hidden states"):
        compare(lambda: Packing([Wrapped()], lambda x: object(), hidden), {"alpha": 0.0})
