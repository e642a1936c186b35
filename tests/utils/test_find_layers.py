"""Which modules of a model are its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import FAMILIES, PlainBlock, PlainModel
from support.stacks import layer_stacks
from torch import nn

from lightning_memo.utils.find_layers import find_stacks, select_stacks


class Experts(PlainBlock):
    """A block with a list of experts, which is larger than the rest of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)) for _ in range(4))
        self.heads = nn.ModuleDict({"a": nn.Linear(32, 8), "b": nn.Linear(32, 8)})


def _in_dict() -> nn.Module:
    """The way of nanoGPT."""
    parts = {"wte": nn.Embedding(8, 32), "h": nn.ModuleList(layer_stacks.blocks(2)), "ln_f": nn.LayerNorm(32)}
    return nn.ModuleDict({"transformer": nn.ModuleDict(parts)})


def _pair() -> nn.Module:
    return nn.ModuleList([PlainModel(layer_stacks.blocks(2)), nn.Sequential(nn.Linear(4, 4))])


def _teacher() -> nn.Module:
    llama = FAMILIES["llama"].build
    return nn.ModuleDict({"student": llama(num_hidden_layers=3), "teacher": llama()})


def _generators() -> nn.Module:
    return nn.ModuleDict({name: PlainModel(layer_stacks.blocks(2)) for name in ("there", "back")})


class _Attributes(nn.Module):
    """Layers in attributes, and in a list of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layer_stacks.blocks(2)
        self.others = [nn.Linear(4, 4), nn.Linear(4, 4)]


CASES = {
    "list": (lambda: PlainModel(layer_stacks.blocks(3)), {"blocks": 3}),
    "experts": (lambda: PlainModel([Experts(), Experts()]), {"blocks": 2}),
    "experts of one layer": (lambda: PlainModel([Experts()]), {"blocks": 1}),
    "nested": (layer_stacks.nested, {"blocks": 6}),
    "stages": (layer_stacks.stages, {"blocks": 4}),
    "mixed": (layer_stacks.mixed, {"blocks": 4}),
    "Sequential with a norm": (layer_stacks.sequential, {"blocks": 4}),
    "shared": (layer_stacks.repeated, {"blocks": 1}),
    "nanoGPT": (_in_dict, {"transformer.h": 2}),
    "models in a list": (_pair, {"0.blocks": 2}),
    "student and teacher": (_teacher, {"teacher.model.layers": 4, "student.model.layers": 3}),
    "models in a dict": (_generators, {"there.blocks": 2, "back.blocks": 2}),
    "ALBERT": (layer_stacks.albert, {"albert.encoder.albert_layer_groups": 1}),
    "BART": (layer_stacks.bart, {"model.decoder.layers": 3, "model.encoder.layers": 3}),
    "linear layers": (lambda: nn.ModuleDict({"mlp": nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])}), {"mlp": 2}),
}


@pytest.mark.parametrize(("build", "expected"), CASES.values(), ids=CASES)
def test_stacks_of_a_model(build, expected):
    """The stacks, the largest first, with the number of their layers."""
    with torch.device("meta"):
        stacks = find_stacks(build())
    assert {stack.name: len(stack.layers) for stack in stacks} == expected
    assert [stack.name for stack in stacks] == list(expected)


@pytest.mark.parametrize(
    "model",
    [nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), nn.ModuleList(), nn.ModuleDict()],
    ids=lambda model: type(model).__name__,
)
def test_no_stacks(model):
    with pytest.raises(ValueError, match="of repeated layers, so there is nothing to swap layer by layer"):
        find_stacks(model)


class CalledDict(nn.ModuleDict):
    """A block that is a dict, and is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self["mlp"](x)


def _dicts(kind: type[nn.ModuleDict]) -> nn.Module:
    return nn.ModuleDict({"blocks": nn.ModuleList(kind({"mlp": nn.Linear(4, 4)}) for _ in range(3))})


@pytest.mark.parametrize("names", [None, "blocks"])
def test_blocks_that_are_never_called(names: str | None) -> None:
    line = r"^the children of blocks are no layers, because ModuleDict is never called itself: make each block a module"
    with pytest.raises(ValueError, match=line):
        select_stacks(_dicts(nn.ModuleDict), names, alone=False)
    (called,) = select_stacks(_dicts(CalledDict), names, alone=False)
    assert len(called.layers) == 3


def test_small_stacks_are_left_out():
    """A stack with less than a quarter of the largest one's parameters is not selected, unless it is named."""
    model = nn.ModuleDict(
        {"large": nn.ModuleList(layer_stacks.blocks(8)), "small": nn.ModuleList(layer_stacks.blocks(1))}
    )
    model["medium"] = nn.ModuleList(layer_stacks.blocks(2))

    def names(given=None, alone=False):
        return [stack.name for stack in select_stacks(model, given, alone)]

    assert names() == ["large", "medium"]
    assert names(alone=True) == ["large"]
    assert names("small", alone=True) == ["small"]
    assert names(["small", "large"]) == ["large", "small"]


def test_a_frozen_teacher_is_larger() -> None:
    model = nn.ModuleDict(
        {"teacher": PlainModel(layer_stacks.blocks(9)), "student": PlainModel(layer_stacks.blocks(2))}
    )
    assert [stack.name for stack in select_stacks(model, None, alone=True)] == ["teacher.blocks"]
    model["teacher"].requires_grad_(False)
    assert [stack.name for stack in select_stacks(model, None, alone=True)] == ["student.blocks"]
    assert {stack.name for stack in select_stacks(model, None, alone=False)} == {"teacher.blocks", "student.blocks"}


def test_layers_that_a_model_holds_twice_are_in_one_stack() -> None:
    """A model beside its compiled form, or a list of layers under two names."""
    model = PlainModel(layer_stacks.blocks(3))
    compiled = nn.ModuleDict({"model": model, "compiled": torch.compile(model, backend="eager")})
    again = nn.ModuleDict({"model": model, "layers": nn.ModuleList(model.blocks[:2])})
    for held in (compiled, again):
        for names in (None, ["blocks", "model.blocks"]):
            (stack,) = select_stacks(held, names, alone=False)
            assert list(stack.layers) == list(model.blocks)


def test_containers_by_name():
    """A name, or its end, selects the layers in a container, also in nested lists; without any, all children."""
    (nested,) = select_stacks(layer_stacks.nested(), "blocks", alone=False)
    (inner,) = select_stacks(layer_stacks.nested(), "blocks.1", alone=False)
    (sequential,) = select_stacks(nn.ModuleDict({"model": layer_stacks.sequential()}), "blocks", alone=False)
    assert (len(nested.layers), len(inner.layers), len(sequential.layers)) == (6, 2, 4)
    with pytest.raises(ValueError, match=r"; its lists are: blocks, blocks\.0, blocks\.1, blocks\.2$"):
        select_stacks(layer_stacks.nested(), "layers", alone=False)


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (
            _Attributes,
            "put its layers into an nn.ModuleList over which its forward loops, or train without lightning_memo",
        ),
        (
            lambda: nn.ModuleDict({"net": nn.Sequential(_mlp(), nn.TransformerEncoderLayer(4, 1, 4))}),
            'if the children of net are its layers, set layers="net"; otherwise put its layers into an nn.ModuleList',
        ),
        (
            lambda: nn.ModuleDict({"net": _mlp()}),  # whose parts are no layers
            "put its layers into an nn.ModuleList over which its forward loops, or train without lightning_memo",
        ),
    ],
    ids=["attributes", "different layers", "an MLP"],
)
def test_a_model_without_stacks_is_told_what_to_do(model: Any, told: str) -> None:
    with pytest.raises(ValueError, match="so there is nothing to swap layer by layer: ") as caught:
        find_stacks(model())
    assert told in str(caught.value)
