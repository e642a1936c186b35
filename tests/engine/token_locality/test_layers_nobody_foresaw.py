"""Layers that mix tokens, write to things or return things have the gradients of plain training at every alpha.

`assert_trains_like_plain` compares a profiled step and steps at alpha 0, 0.5 and 1. A layer that has to run whole does
so at alpha 0.5, too, so that its gradients are bit-identical.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import VOCABULARY, PlainBlock, PlainModel, make_batch
from support.harness import (
    EngineUnderTest,
    assert_close,
    assert_equal,
    assert_trains_like_plain,
    loss_and_gradients,
)
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

BATCH = make_batch(2, 48, seed=0)
ALPHAS = (0.0, 0.5, 1.0)
LAYERS = 4


class PassingModel(PlainModel):
    """Gives each layer a dict and reads, besides hidden states, what layers return, write or keep."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x, shared, besides = self.embed(input_ids), {}, []
        for block in self.blocks:
            output = block(x, shared)
            x, *sides = output if isinstance(output, tuple) else (output,)
            besides += [*sides, *shared.pop("losses", [])]
            besides += [m.kept for m in block.modules() if isinstance(getattr(m, "kept", None), Tensor)]
        losses = [t.square().mean() * 0.1 for t in besides if isinstance(t, Tensor)]
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss + sum(losses, torch.zeros(())))


class Block(PlainBlock):
    """A block that is told which layer it is, and calls attention in parts that others may change."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.router = nn.Linear(32, 4)
        self.gate = nn.Parameter(torch.zeros(()))

    def attend(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        q, k, v = self.qkv_of(self.norm1(x), shared)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))

    def qkv_of(self, x: Tensor, shared: dict[str, Any]) -> tuple[Tensor, ...]:
        return tuple(t.transpose(1, 2) for t in self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2))

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Any:
        x = self.attend(x, shared)
        return x + self.mlp(self.norm2(x))


# ---- positions, and tokens that meet before attention


class RotaryInside(Block):
    def qkv_of(self, x: Tensor, shared: dict[str, Any]) -> tuple[Tensor, ...]:
        q, k, v = super().qkv_of(x, shared)
        angles = torch.arange(x.shape[1])[:, None] * 0.3 ** torch.arange(q.shape[-1] // 2)
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        q, k = (t * cos + torch.cat([-t[..., 4:], t[..., :4]], -1) * sin for t in (q, k))
        return q, k, v


class ShiftedKeys(Block):
    def qkv_of(self, x: Tensor, shared: dict[str, Any]) -> tuple[Tensor, ...]:
        q, k, v = super().qkv_of(x, shared)
        return q, k + 0.5 * F.pad(k, (0, 0, 1, 0))[:, :, :-1], v


class EverySecondMixes(Block):
    def qkv_of(self, x: Tensor, shared: dict[str, Any]) -> tuple[Tensor, ...]:
        return super().qkv_of(x + x.cumsum(1) * 0.01 if self.index % 2 else x, shared)


class ClosedGate(Block):
    def attend(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        return super().attend(x, shared) + self.gate * x.mean(1, keepdim=True)


class LimitedCapacity(Block):
    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        x = self.attend(x, shared)
        chosen = F.one_hot(self.router(x).argmax(-1), 4)
        accepted = (chosen * (chosen.cumsum(1) <= 10)).sum(-1, keepdim=True)
        return x + accepted * self.mlp(self.norm2(x))


# ---- statistics over tokens


class BalanceReturned(Block):
    def forward(self, x: Tensor, shared: dict[str, Any]) -> tuple[Tensor, Tensor]:
        x = super().forward(x, shared)
        return x, self.router(x).softmax(-1).mean((0, 1))


class BalanceKept(Block):
    kept: Tensor

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        x = super().forward(x, shared)
        self.kept = self.router(x).softmax(-1).mean((0, 1))
        return x


class AddLoss(torch.autograd.Function):
    """Returns `x`. The gradient of a loss is added in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor]:
        return dx, torch.full((), 0.1)


class BalanceInjected(Block):
    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        x = super().forward(x, shared)
        out: Tensor = AddLoss.apply(x, self.router(x).softmax(-1).mean((0, 1)).square().sum())
        return out


class Normalised(torch.autograd.Function):
    """Returns `x`. Its gradient is divided by its norm over all tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx / (dx.norm() + 1e-3)


class NormalisedGradient(Block):
    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        out: Tensor = Normalised.apply(super().forward(x, shared))
        return out


class HookOnATensor(Block):
    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        x = super().forward(x, shared)
        if x.requires_grad:
            x.register_hook(lambda dx: dx / (dx.norm() + 1e-3))
        return x


class Tiled(torch.autograd.Function):
    """Runs `compute` tile by tile, and again in the backward pass: only `x` is saved."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.compute = compute
        ctx.save_for_backward(x)
        return torch.cat([compute(tile) for tile in x.chunk(2, 1)], 1)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        tiles = [tile.detach().requires_grad_() for tile in x.chunk(2, 1)]
        for tile, gradient in zip(tiles, dy.chunk(2, 1), strict=True):
            with torch.enable_grad():
                y = ctx.compute(tile)
            torch.autograd.backward(y, gradient)
        return None, torch.cat([tile.grad for tile in tiles], 1)


class TiledMLP(Block):
    """Has an MLP that recomputes itself, like those of long-context libraries."""

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        x = self.attend(x, shared)
        y: Tensor = Tiled.apply(self.mlp, self.norm2(x))
        return x + y


# ---- arguments that are written


class ValueResidual(Block):
    def qkv_of(self, x: Tensor, shared: dict[str, Any]) -> tuple[Tensor, ...]:
        q, k, v = super().qkv_of(x, shared)
        return q, k, v + 0.5 * shared.setdefault("first", v)


class LastValues(Block):
    def qkv_of(self, x: Tensor, shared: dict[str, Any]) -> tuple[Tensor, ...]:
        q, k, v = super().qkv_of(x, shared)
        v = v + 0.5 * shared.get("last", 0.0)
        shared["last"] = v
        return q, k, v


class LossesInAList(Block):
    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        x = super().forward(x, shared)
        shared.setdefault("losses", []).append(self.router(x).softmax(-1).mean((0, 1)))
        return x


WHOLE: dict[type[Block], str] = {
    RotaryInside: "aten.arange makes a tensor by the number of tokens",
    ShiftedKeys: "aten.constant_pad_nd computes along the tokens",
    EverySecondMixes: "aten.cumsum computes along the tokens",
    ClosedGate: "aten.mean computes along the tokens",
    LimitedCapacity: "aten.cumsum computes along the tokens",
    BalanceReturned: "aten.mean computes along the tokens",
    BalanceKept: "aten.mean computes along the tokens",
    BalanceInjected: "aten.mean computes along the tokens",
    NormalisedGradient: "aten.linalg_vector_norm computes along the tokens",
    HookOnATensor: "aten.linalg_vector_norm computes along the tokens",
    TiledMLP: "aten.split computes along the tokens",
    LossesInAList: "aten.mean computes along the tokens",
}


def model_of(block: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return PassingModel([block(n) for n in range(LAYERS)])


@pytest.mark.parametrize(("block", "why"), WHOLE.items(), ids=[block.__name__ for block in WHOLE])
def test_layers_that_run_whole(block: type[Block], why: str) -> None:
    # Of these, some layers are cut.
    exact_alphas = (0.0, 1.0) if block in (EverySecondMixes,) else ALPHAS
    found = assert_trains_like_plain(model_of(block), BATCH, exact_alphas=exact_alphas)
    assert found.startswith(f"{block.__name__} may not compute each token by itself outside attention: {why}")


@pytest.mark.parametrize("block", [ValueResidual, LastValues])
def test_values_that_layers_share_by_head(block: type[Block]) -> None:
    """The layers are cut, and so are the values."""
    assert not assert_trains_like_plain(model_of(block), BATCH)


def test_hooks_of_a_user_inside_layers() -> None:
    model = model_of(Block)
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda mlp, _, y: setattr(mlp, "kept", y.mean((0, 1))))
    found = assert_trains_like_plain(model, BATCH, exact_alphas=ALPHAS)
    assert found.endswith("hooks on mlp would see the tokens of one slice only")


# ---- arguments that differ


class Told(Block):
    """Mixes tokens if an argument says so."""

    def forward(self, x: Tensor, shared: Any) -> Tensor:
        x = super().forward(x, {})
        shared = shared.options if isinstance(shared, Nested) else shared() if callable(shared) else shared
        told = shared if isinstance(shared, bool) else shared["mixes"] if isinstance(shared, dict) else shared.mixes
        return x + 0.1 * x.cumsum(1) if told else x


class Options:
    """Options in an object of a user's class."""

    def __init__(self, mixes: bool) -> None:
        self.mixes = mixes


@dataclass(slots=True)
class Slots:
    """Options without a dict of attributes."""

    mixes: bool


class Nested:
    """Options within options."""

    def __init__(self, mixes: bool) -> None:
        self.options = Options(mixes)


def _told(mixes: bool) -> bool:
    return mixes


class TellingModel(PassingModel):
    """Tells some of its layers, from some step on, to mix tokens."""

    def __init__(self, blocks: Sequence[nn.Module], kind: Callable[[bool], Any], told: Callable[[int, int], bool]):
        super().__init__(blocks)
        self.kind, self.told, self.steps = kind, told, 0

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x = self.embed(input_ids)
        for number, block in enumerate(self.blocks):
            x = block(x, self.kind(self.told(number, self.steps)))
        self.steps += 1
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


TOLD = {
    "dict": lambda mixes: {"mixes": mixes},
    "object": Options,
    "slots": Slots,
    "nested": Nested,
    "function": lambda mixes: lambda: mixes,
    "partial": lambda mixes: functools.partial(_told, mixes),
}


@pytest.mark.parametrize("kind", TOLD.values(), ids=TOLD)
def test_layers_that_get_other_arguments_than_the_first_one(kind: Callable[[bool], Any]) -> None:
    torch.manual_seed(0)
    model = TellingModel([Told(n) for n in range(LAYERS)], kind, lambda number, _: number % 2 == 1)
    assert "aten.cumsum computes along the tokens" in assert_trains_like_plain(model, BATCH)


@pytest.mark.parametrize("kind", [lambda mixes: {"mixes": mixes}, Options], ids=["dict", "object"])
def test_arguments_that_change_while_training(kind: Callable[[bool], Any]) -> None:
    torch.manual_seed(0)
    model = TellingModel([Told(n) for n in range(LAYERS)], kind, lambda _, step: step > 2)
    with EngineUnderTest(model, check_slices=False) as under_test:
        under_test.profile_step(BATCH)
        under_test.load(0.5)
        for _ in range(2):
            under_test.step(BATCH)
        mixed = under_test.step(BATCH)
    assert_equal(mixed, loss_and_gradients(model, BATCH))


@pytest.mark.slow
def test_numbers_that_differ_in_each_call_end_slices() -> None:
    torch.manual_seed(0)
    model = TellingModel([Told(n) for n in range(LAYERS)], Options, lambda *_: False)
    model.kind = lambda _: {"mixes": False, "step": model.steps}
    with EngineUnderTest(model) as under_test:
        under_test.profile_step(BATCH)
        under_test.load(0.5)
        plain = loss_and_gradients(model, BATCH)
        for _ in range(20):
            assert_close(under_test.step(BATCH), plain)
        assert under_test.engine.layer_classes.unsliceable == "Told gets other arguments in each call"


# ---- what a layer keeps elsewhere

KEPT: list[Tensor] = []


class KeepsElsewhere(Block):
    def forward(self, x: Tensor, shared: dict[str, Any]) -> Tensor:
        x = super().forward(x, shared)
        KEPT.append(self.router(x))
        return x


@pytest.mark.slow
def test_tensors_in_a_global_list_are_refused() -> None:
    with (
        EngineUnderTest(model_of(KeepsElsewhere)) as under_test,
        pytest.raises(ValueError, match="KeepsElsewhere keeps tensors outside of its modules") as caught,
    ):
        under_test.step(BATCH)
    KEPT.clear()
    assert "\n" not in str(caught.value)


class SummingModel(PassingModel):
    """Adds to the loss what hooks inside its layers have kept in a list."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__(blocks)
        self.kept: list[list[Tensor]] = [[]]
        for block in blocks:
            block.mlp.register_forward_hook(lambda mlp, _, y: self.kept[0].append(y.square().mean()))

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        self.kept[0] = []
        output: Any = super().forward(input_ids, labels)
        assert len(self.kept[0]) == LAYERS
        return CausalLMOutput(loss=output.loss + sum(self.kept[0]))


def test_hooks_that_keep_things_in_a_list_of_the_user() -> None:
    torch.manual_seed(0)
    found = assert_trains_like_plain(SummingModel([Block(n) for n in range(LAYERS)]), BATCH, exact_alphas=ALPHAS)
    assert found.endswith("hooks on mlp would see the tokens of one slice only")


def test_a_hook_in_one_layer_leaves_the_others_as_they_are() -> None:
    model = model_of(Block)
    model.blocks[0].mlp.register_forward_hook(lambda mlp, _, y: None)
    with EngineUnderTest(model) as under_test:
        under_test.profile_step(BATCH)
        whys = [traits.unsliceable for traits in under_test.engine.layer_classes]
    assert whys[0].endswith("hooks on mlp would see the tokens of one slice only") and whys[1:] == [""] * (LAYERS - 1)


# ---- layers that can be cut


@dataclass
class Output:
    count: int
    hidden: Tensor


class ReturnsDataclass(Block):
    def forward(self, x: Tensor, shared: dict[str, Any]) -> Any:
        return Output(3, super().forward(x, shared))


class ReturnsDict(Block):
    def forward(self, x: Tensor, shared: dict[str, Any]) -> Any:
        x = super().forward(x, shared)
        return {"scores": self.router(x), "hidden": x, "nothing": None}


class ReturnsScores(Block):
    """Returns values by token in three layouts: tokens first, tokens and batch in one dimension, and tokens last."""

    def forward(self, x: Tensor, shared: dict[str, Any]) -> Any:
        x = super().forward(x, shared)
        scores = self.router(x)
        weights = torch.linspace(0.5, 1.5, 2 * 48)[:, None]  # a wrong order would show
        return x, scores.transpose(0, 1), scores.flatten(0, 1), scores.transpose(1, 2), weights


class UnpackingModel(PassingModel):
    """Reads hidden states from a dict or a dataclass, and compares scores with a target that differs by token."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x, losses, target = self.embed(input_ids), [], torch.linspace(-1, 1, 2 * 48 * 4)
        for block in self.blocks:
            output = block(x, {})
            if isinstance(output, Output):
                assert output.count == 3
                x, sides = output.hidden, []
            elif isinstance(output, dict):
                assert output["nothing"] is None
                x, sides = output["hidden"], [output["scores"]]
            else:
                x, *sides = output
            losses += [(t.flatten() - target[: t.numel()]).square().mean() for t in sides]
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss + 0.1 * sum(losses, torch.zeros(())))


@pytest.mark.parametrize("block", [ReturnsDataclass, ReturnsDict])
def test_outputs_of_other_types(block: type[Block]) -> None:
    torch.manual_seed(0)
    found = assert_trains_like_plain(UnpackingModel([block(n) for n in range(LAYERS)]), BATCH)
    assert found == "" or block is ReturnsDataclass


def test_side_values_are_joined_in_the_order_of_tokens() -> None:
    torch.manual_seed(0)
    assert assert_trains_like_plain(UnpackingModel([ReturnsScores(n) for n in range(LAYERS)]), BATCH) == ""
