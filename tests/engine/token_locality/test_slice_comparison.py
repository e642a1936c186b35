"""A layer that begins to mix tokens while training is noticed: by what it computes, or by its gradients only."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import torch.nn.functional as F
from support.families import PlainBlock, PlainModel, make_batch
from support.harness import EngineUnderTest, assert_equal, loss_and_gradients
from support.trainer_harness import LanguageModel, fit, plain
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from lightning_memo import MemoStrategy
from lightning_memo.engine.forward.collected_outputs import TokenPlace
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.modules.slice_comparison import difference_in_slices

BATCH = make_batch(2, 48, seed=0)


class HalvedGradient(torch.autograd.Function):
    """Halves the gradients of all tokens but the first."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return torch.cat([dx[:, :1], dx[:, 1:] / 2], 1)


class NormalisedWeightGradient(torch.autograd.Function):
    """A matrix product. The gradient of the weight is divided by the number of tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight, dy.flatten(0, 1).T @ x.flatten(0, 1) / x.shape[1]


OPEN: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


class Opening(PlainBlock):
    """Does something else once it is `open`: in its queries, keys and values, in its output, or beside it."""

    def __init__(self, at: str = "", change: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__()
        self.at, self.change = at, change

    @property
    def open(self) -> int:
        """What a layer reads outside of its attributes is not noticed when it changes."""
        return OPEN.get(self, 0)

    @open.setter
    def open(self, value: int) -> None:
        OPEN[self] = value

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k, v = self._changed("q", q), self._changed("k", k), self._changed("v", v)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        if self.open and self.at == "weight":
            x = NormalisedWeightGradient.apply(x, self.out.weight)
        x = self._changed("y", x + self.mlp(self.norm2(x)))
        return (x, self._changed("side", x.square().mean(-1))) if self.at == "side" else x

    def _changed(self, place: str, t: Tensor) -> Tensor:
        return self.change(t) if self.open and self.at == place else t


def shifted(t: Tensor) -> Tensor:
    return t + 0.1 * t.roll(1, 1)


DIFFERENCES = {
    "q": ("q", shifted, "queries"),
    "k": ("k", lambda t: t * torch.linspace(0.9, 1.1, t.shape[1]).view(1, -1, 1, 1), "keys"),
    "v": ("v", lambda t: t - 0.1 * t.mean(1, keepdim=True), "values"),
    "y": ("y", lambda t: t + 0.01 * t.cumsum(1), "hidden states"),
    "number of tokens": ("y", lambda t: t * (1 + 1 / t.shape[1]), "hidden states"),
    "side": ("side", lambda t: t / t.sum(1, keepdim=True), "a side value"),
    "gradient of tokens": ("y", HalvedGradient.apply, "the gradient of the input"),
    "gradient of a weight": ("weight", torch.clone, "the gradient of out.weight"),
    "shape": ("y", lambda t: t.view(2, 12, -1).sum(-1), "Opening returned Tensor"),
}


def compared(block: Opening, tokens: int = 48, dtype: torch.dtype = torch.float32, turn: int = 0) -> str:
    x = torch.randn(2, 60, 32).to(dtype).requires_grad_()
    call = LayerCall(block, block.forward, (), {}, 60, 2)
    places = (TokenPlace(1, 1, 1),) if block.at == "side" else ()
    return difference_in_slices(call, x, places, 5, tokens, turn)


@pytest.mark.parametrize(("at", "change", "named"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_what_differs_is_named(at: str, change: Callable[[Tensor], Tensor], named: str) -> None:
    torch.manual_seed(0)
    block = Opening(at, change)
    if named.startswith("Opening"):
        block.open = 1
        with pytest.raises(ValueError, match=named):
            compared(block)
        return
    assert compared(block) == ""
    block.open = 1
    assert {compared(block, turn=turn) for turn in range(len(list(block.parameters())))} - {""} == {named}


def test_a_comparison_leaves_no_trace() -> None:
    torch.manual_seed(0)
    block, x = Opening(), torch.randn(2, 60, 32)
    block.register_buffer("calls", torch.zeros(()))
    block.norm1.register_forward_pre_hook(lambda norm, _: setattr(norm, "seen", block.calls.add_(1)))
    state = torch.get_rng_state()
    difference_in_slices(LayerCall(block, block.forward, (), {}, 60, 2), x, (), 5, 48)
    assert torch.equal(state, torch.get_rng_state()) and block.calls == 0 and not hasattr(block.norm1, "seen")
    assert all(p.grad is None for p in block.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [2, 7, 48])
def test_rounding_is_no_difference(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert compared(Opening("side").to(dtype), tokens, dtype) == ""


class DoubledInPlace(torch.autograd.Function):
    """Doubles what it gets, where it is, as kernels do that save memory; its backward does so, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx.mul_(2)


class Overwriting(Opening):
    """Overwrites queries, the result of attention, and the gradients of both and of its output."""

    def forward(self, x: Tensor) -> Any:
        q, k, v = (t.transpose(1, 2) for t in self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2))
        y = F.scaled_dot_product_attention(DoubledInPlace.apply(q.clone()), k, v, is_causal=True)
        y = DoubledInPlace.apply(y)
        return DoubledInPlace.apply(x + self.out(y.transpose(1, 2).flatten(2)))


class OnlyOverwriting(Opening):
    """Returns the gradient that it gets, doubled where it is, as the gradient of its input."""

    def forward(self, x: Tensor) -> Any:
        return DoubledInPlace.apply(x)


@pytest.mark.parametrize("kind", [Overwriting, OnlyOverwriting])
def test_what_a_layer_overwrites_is_no_difference(kind: type[Opening]) -> None:
    torch.manual_seed(0)
    assert compared(kind()) == ""


class OneChoice(Opening):
    """Weighs its output by the share of the only expert: one, with a gradient that is zero but for rounding."""

    def __init__(self, at: str = "", change: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__(at, change)
        self.router = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Any:
        chosen = self._changed("router", self.router(x)).sigmoid()
        return super().forward(x) * (chosen / chosen)


@pytest.mark.parametrize("tokens", [7, 48])
def test_gradients_that_are_zero_but_for_rounding_are_no_difference(tokens: int) -> None:
    torch.manual_seed(0)
    block = OneChoice()
    assert {compared(block, tokens, turn=turn) for turn in range(len(list(block.parameters())))} == {""}


class Faint(Opening):
    """Adds a ten-thousandth of what a weight computes, whose gradient depends on the number of tokens once open."""

    def __init__(self) -> None:
        super().__init__()
        self.faint = nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Any:
        added = NormalisedWeightGradient.apply(x, self.faint.weight) if self.open else self.faint(x)
        return super().forward(x) + 1e-4 * added


def test_wrong_gradients_that_are_small_are_named() -> None:
    torch.manual_seed(0)
    block = Faint()
    block.open = 1
    found = {compared(block, turn=turn) for turn in range(len(list(block.parameters())))}
    assert found - {""} == {"the gradient of faint.weight"}


def opening_model() -> PlainModel:
    torch.manual_seed(0)
    return PlainModel([Opening("k", shifted) for _ in range(4)])


def test_layers_run_whole_from_then_on() -> None:
    model = opening_model()
    with EngineUnderTest(model) as under_test, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        under_test.profile_step(BATCH)
        under_test.load(0.5)
        under_test.step(BATCH)
        under_test.step(BATCH)
        for block in model.blocks:
            block.open = 1
        for _ in range(2):  # steps 4, in which layer 0, 1 or 2 is compared, and 5
            under_test.step(BATCH)
        told = [str(w.message) for w in caught if "lightning_memo" in str(w.message)]
        assert len(told) == 1 and "\n" not in told[0]
        assert told[0].startswith(
            "lightning_memo: Opening does not compute in slices what it computes on all tokens (keys)"
        )
        whole = under_test.step(BATCH)
    assert_equal(whole, loss_and_gradients(model, BATCH))


class Opened(LanguageModel):
    """Opens its layers after some steps."""

    opens_after = 2

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        for block in self.model.blocks:
            block.open = int(self.trainer.global_step >= self.opens_after)


def test_a_run_that_needs_slices_ends() -> None:
    settings = {"alpha": 0.5, "slice_tokens": 8, "stream_from_host": "hidden"}
    with pytest.raises(
        ValueError, match=r"Opening does not compute in slices .* \(keys\), and these settings need"
    ) as e:
        fit(MemoStrategy(**settings), Opened(opening_model), max_steps=6)
    assert "\n" not in str(e.value)


@pytest.mark.slow
def test_a_plan_by_kind_is_replaced_by_one_of_whole_layers() -> None:
    with pytest.warns(UserWarning, match=r"Opening does not .* \(keys\)\. From now on, layers run as one slice"):
        result = fit(MemoStrategy(device_memory="1100KiB"), Opened(opening_model), max_steps=8)
    assert not result.plan.swap.plain and result.plan.swap.storage.has_one_alpha
    expected = plain(Opened(opening_model), max_steps=8).losses
    assert result.losses[:2] == pytest.approx(expected[:2], rel=1e-6)  # the layers open before the comparison in step 4
    with pytest.warns(UserWarning, match="layers run as one slice"):
        early = fit(MemoStrategy(device_memory="1100KiB"), OpenedEarly(opening_model), max_steps=8)
    assert early.losses == pytest.approx(plain(OpenedEarly(opening_model), max_steps=8).losses, rel=1e-5)


class OpenedEarly(Opened):
    """Opens its layers before the first comparison."""

    opens_after = 1


class OpeningMLP(LlamaMLP):
    """Adds a mean over the tokens once it is open."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return y + 0.1 * y.mean(1, keepdim=True) if OPEN.get(self) else y


class OpenedLlama(LanguageModel):
    """Opens the MLPs of a Llama after the second step."""

    def __init__(self) -> None:
        super().__init__("llama")
        for layer in self.model.model.layers:
            layer.mlp.__class__ = OpeningMLP

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        for layer in self.model.model.layers:
            OPEN[layer.mlp] = int(self.trainer.global_step >= 2)


@pytest.mark.slow
def test_slices_of_the_model_are_compared() -> None:
    with pytest.raises(ValueError, match=r"LlamaDecoderLayer does not compute in slices .* \(hidden states\)"):
        fit(MemoStrategy(slice_tokens=16, stream_from_host="model"), OpenedLlama(), max_steps=6)


def test_a_comparison_runs_no_hooks_on_weights() -> None:
    """A hook that clamps a gradient clamps that of all tokens, not those of slices."""
    block, seen = Opening(), list[Tensor]()
    for p in block.parameters():
        p.register_hook(lambda gradient: seen.append(gradient) or gradient.clamp(-1e-3, 1e-3))
    assert compared(block) == "" and not seen
    block(torch.randn(2, 8, 32)).sum().backward()
    assert len(seen) == len(list(block.parameters()))


def test_it_can_be_turned_off() -> None:
    settings = {"alpha": 0.5, "check_slices": False}
    result, expected = fit(MemoStrategy(**settings), Opened(opening_model), max_steps=6), plain(Opened(opening_model))
    assert result.losses[:2] == pytest.approx(expected.losses[:2], abs=1e-5)
    assert result.losses[2] != pytest.approx(expected.losses[2], abs=1e-5)


@pytest.mark.parametrize("alpha", [0.3, 0.5])
def test_a_warning_is_given_while_training(alpha: float) -> None:
    with pytest.warns(UserWarning, match="From now on, layers run as one slice"):
        result = fit(MemoStrategy(alpha=alpha), Opened(opening_model), max_steps=4)
    assert result.losses[:2] == pytest.approx(plain(Opened(opening_model)).losses[:2], abs=1e-5)


class OwnAutocast(PlainBlock):
    """Computes in half precision, whatever the run does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"alpha": 0.5}, {"alpha": 0.5, "slice_tokens": 8}], ids=str)
def test_rounding_in_half_precision_is_no_difference(settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*does not compute in slices what it computes on all tokens.*")
        result = fit(MemoStrategy(**settings), LanguageModel(lambda: PlainModel([OwnAutocast() for _ in range(3)])))
    expected = plain(LanguageModel(lambda: PlainModel([OwnAutocast() for _ in range(3)])))
    assert result.losses == pytest.approx(expected.losses, rel=2**-8)
