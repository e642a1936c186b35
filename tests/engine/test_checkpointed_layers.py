"""Activation checkpointing in or around layers is refused in one line; elsewhere it works."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.families import PlainBlock, PlainModel
from support.markers.slow import slow_if
from support.samples.messages import assert_one_line
from support.trainer_harness import LanguageModel, copy_threads, fit, forwards, plain
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_memo import MemoStrategy
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.token_locality.prove_locality import prove_locality

OFF = ("turn it off", "lightning_memo recomputes by itself", "alpha=0 is full recomputation")


class Whole(torch.autograd.Function):
    """Checkpointing of other libraries: runs without gradients, and runs again with gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.compute, ctx.state = compute, torch.get_rng_state()
        ctx.save_for_backward(x)
        return compute(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.compute(x)
        torch.autograd.backward(y, dy)
        return None, x.grad


def again(reentrant: bool | None) -> Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]:
    """Runs a function with checkpointing; `None` is checkpointing that is not PyTorch's."""
    if reentrant is None:
        return Whole.apply
    return lambda compute, x: checkpoint(compute, x, use_reentrant=reentrant)


def layers(reentrant: bool | None) -> nn.Module:
    class Block(PlainBlock):
        def forward(self, x: Tensor) -> Tensor:
            return again(reentrant)(super().forward, x)

    return PlainModel([Block() for _ in range(4)])


class Again(nn.Module):
    """A module that is recomputed."""

    def __init__(self, inner: nn.Module, reentrant: bool | None) -> None:
        super().__init__()
        self.inner, self.again = inner, again(reentrant)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.inner, x)


def mlps(reentrant: bool | None, dropout: float = 0.0) -> nn.Module:
    model = PlainModel([PlainBlock() for _ in range(4)])
    for block in model.blocks:
        block.mlp = Again(nn.Sequential(block.mlp, nn.Dropout(dropout)), reentrant)
    return model


def wrapped() -> nn.Module:
    model = PlainModel([PlainBlock() for _ in range(4)])
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, PlainBlock))
    return model


class Around(PlainModel):
    """The model checkpoints its layers from outside."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__([PlainBlock() for _ in range(4)])
        self.run = again(reentrant)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = self.run(lambda x, block=block: block(x).tanh(), x)
        return type("Output", (), {"loss": nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())})


class InnerGradient(PlainBlock):
    """Its forward runs a backward; `apart` protects it as the message recommends."""

    apart = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.apart:
            return super().forward(x + self.gradient(x))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            gradient = self.gradient(x)
        return super().forward(x + gradient)

    @torch.enable_grad()
    def gradient(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.mlp(x).square().sum(), x)[0]


class Apart(InnerGradient):
    apart = True


class FunctionalGradient(PlainBlock):
    """Differentiates a function by a transform."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.func.grad(lambda z: z.square().sum() / 10)(x))


REFUSED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "layer, reentrant": (lambda: layers(True), ("torch.utils.checkpoint", *OFF)),
    "layer, not reentrant": (lambda: layers(False), ("torch.utils.checkpoint", *OFF)),
    "layer, another library": (lambda: layers(None), ("attention runs without gradients", *OFF)),
    "MLP, reentrant": (lambda: mlps(True), ("torch.utils.checkpoint", *OFF)),
    "MLP, not reentrant": (lambda: mlps(False), ("torch.utils.checkpoint", *OFF)),
    "wrapped": (wrapped, ("CheckpointWrapper", "PlainBlock", *OFF)),
    "around, reentrant": (lambda: Around(True), ("PlainBlock runs again in the backward", *OFF)),
    "around, not reentrant": (lambda: Around(False), ("PlainBlock runs again in the backward", *OFF)),
    "around, another library": (lambda: Around(None), ("PlainBlock runs again in the backward", *OFF)),
    "backward in the forward": (
        lambda: PlainModel([InnerGradient() for _ in range(4)]),
        ("InnerGradient runs a backward within its forward", "saved_tensors_hooks"),
    ),
    "a transform in the forward": (
        lambda: PlainModel([FunctionalGradient() for _ in range(4)]),
        (
            "FunctionalGradient calls torch.func.grad, vjp, jacrev or hessian in its forward",
            "write out this derivative",
        ),
    ),
}


@pytest.mark.parametrize(("build", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(build: Callable[[], nn.Module], words: tuple[str, ...]) -> None:
    own = CheckpointFunction.forward
    module = LanguageModel(build)
    with pytest.raises(ValueError, match=r"\w") as caught:
        fit(MemoStrategy(alpha=0.5), module)
    assert_one_line(caught.value, *words)
    assert forwards(module) == [] and copy_threads() == []
    assert CheckpointFunction.forward is own
    assert fit("auto", module).trainer.global_step == 4  # it trains without the strategy, as before


@pytest.mark.parametrize("reentrant", [True, False])
def test_the_advice_is_the_same_in_slices(reentrant: bool) -> None:
    with pytest.raises(ValueError, match="activation checkpointing") as caught:
        fit(MemoStrategy(alpha=0.5, slice_tokens=16, host_backed="all"), LanguageModel(lambda: layers(reentrant)))
    assert_one_line(caught.value, *OFF)
    assert "host_backed" not in str(caught.value)


class Gradients(Callback):
    """Losses of each optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, module: nn.Module, optimizer: Any) -> None:
        self.steps.append({name: p.grad.clone() for name, p in module.named_parameters()})


def assert_trains_as_plainly(build: Callable[[], nn.Module], exact: bool, alpha: float) -> None:
    mine, plains = Gradients(), Gradients()
    ours, expected = (
        run(LanguageModel(build), callbacks=[noted])
        for run, noted in ((lambda *a, **k: fit(MemoStrategy(alpha=alpha), *a, **k), mine), (plain, plains))
    )
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-4, "atol": 2e-6}
    torch.testing.assert_close(mine.steps, plains.steps, **tolerance)
    torch.testing.assert_close(ours.losses, expected.losses, **tolerance)


class Beside(PlainModel):
    """Embeddings and the head are checkpointed, the layers are not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__([PlainBlock() for _ in range(4)])
        tower = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.2))
        self.embed = nn.Sequential(self.embed, Again(tower, reentrant))
        self.head = Again(self.head, reentrant)


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("reentrant", [True, False, None])
def test_beside_the_layers_it_goes_on_working(reentrant: bool | None, alpha: float) -> None:
    assert_trains_as_plainly(lambda: Beside(reentrant), alpha == 0.0, alpha)


def test_a_tower_that_transformers_checkpoints_is_none_of_the_layers() -> None:
    def build() -> nn.Module:
        model = Beside(True)
        model.embed.gradient_checkpointing = True  # as transformers says it
        return model

    fit(MemoStrategy(alpha=0.0), LanguageModel(build), max_steps=1)
    model = build()
    model.blocks[1].mlp.gradient_checkpointing = True
    with pytest.raises(ValueError, match="gradient_checkpointing_disable"):
        fit(MemoStrategy(), LanguageModel(lambda: model), max_steps=1)


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dropout_that_another_library_draws_again(alpha: float) -> None:
    """The layers are not cut, and the results are bit-identical."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_trains_as_plainly(lambda: mlps(None, 0.2), True, alpha)
    told = any("draws random numbers for each token" in str(w.message) for w in caught)
    assert told == (alpha == 0.5)  # at 0 and 1 nothing would be cut


def test_a_proof_leaves_gradients_as_they_are() -> None:
    """The backward of these layers adds to the gradients of weights by itself."""
    block, x = mlps(None, 0.2).blocks[0], torch.randn(2, 24, 32)
    block.norm2.weight.grad = gradient = torch.zeros(32)
    prove_locality(LayerCall(block, block.forward, (), {}, 24, 2), x)
    assert block.norm2.weight.grad is gradient and not gradient.any()
    assert all(p.grad is None for p in block.parameters() if p is not block.norm2.weight)


def test_what_is_said_of_a_backward_in_the_forward_helps() -> None:
    assert_trains_as_plainly(lambda: PlainModel([Apart() for _ in range(4)]), True, 0.0)


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.clone())
        return x.square()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return ctx.saved_tensors[0] * dy + ctx.saved_tensors[0] * dy


class TwiceBlock(PlainBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(ReadsTwice.apply(x))


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_saved_tensors_may_be_read_twice(alpha: float) -> None:
    assert_trains_as_plainly(lambda: PlainModel([TwiceBlock() for _ in range(4)]), True, alpha)
