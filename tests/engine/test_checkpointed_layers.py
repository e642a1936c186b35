"""Activation checkpointing in or around layers is refused in one line; elsewhere it works."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.families import FAMILIES, PlainBlock, PlainModel, make_batch
from support.harness import gradients_of
from support.markers.slow import slow_if
from support.samples.messages import assert_one_line
from support.trainer_harness import LanguageModel, copy_threads, fit, forwards, plain
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_memo import MemoLoop, MemoStrategy
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


PLANS: dict[str, dict[str, Any]] = {
    "plain": {"loss_chunk_tokens": 4},
    "half": {"alpha": 0.5, "loss_chunk_tokens": 4},
    "slices": {"alpha": 0.5, "slice_tokens": 8, "stream_from_host": "hidden", "loss_chunk_tokens": 4},
}


class Trained:
    """A model, trained by a function of its embeddings that gives logits."""

    def __init__(self) -> None:
        self.model = FAMILIES["llama"].build().train()
        self.ids = make_batch(2, 24)["input_ids"]

    def step(self, compute: Callable[[Tensor], Tensor] | None = None, changed: nn.Parameter | None = None) -> None:
        self.model.zero_grad()
        compute = compute or self.logits
        logits = compute(self.model.get_input_embeddings()(self.ids))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), self.ids[:, 1:].flatten())
        if changed is not None:
            with torch.no_grad():
                changed.mul_(2)
        loss.backward()

    def logits(self, embeds: Tensor) -> Tensor:
        return self.model(inputs_embeds=embeds).logits

    def head(self, embeds: Tensor, run: Callable[..., Tensor]) -> Tensor:
        model = self.model.base_model
        hidden = model.layers[0](embeds, position_embeddings=model.rotary_emb(embeds, torch.arange(24)[None]))
        return run(lambda h: self.model.lm_head(model.norm(h)), hidden)


@slow_if(lambda plan, reentrant: plan == "slices" and reentrant)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("reentrant", [True, False, None])
def test_around_the_model(reentrant: bool | None, plan: str) -> None:
    """It trains as in plain training where layers run plainly, weights that change before the backward included."""
    mine, expected, run = Trained(), Trained(), again(reentrant)
    mine.model.load_state_dict(expected.model.state_dict())
    with MemoLoop(mine.model, torch.optim.SGD(mine.model.parameters(), lr=0.0), **PLANS[plan]):
        for n in range(4):
            for each in (mine, expected):
                compute = (lambda embeds, each=each: run(each.logits, embeds)) if n >= 2 else None
                changed = each.model.base_model.norm.weight if n == 3 else None
                if each is expected or plan == "plain" or n < 2:
                    each.step(compute, changed)
                    continue
                with pytest.raises(ValueError, match=r"runs again in the backward|runs inside of") as caught:
                    each.step(compute, changed)
                assert_one_line(caught.value, *OFF)
                mine.model.load_state_dict(expected.model.state_dict())
            if plan == "plain" or n < 2:
                torch.testing.assert_close(gradients_of(mine.model), gradients_of(expected.model), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["half", "slices"])
@pytest.mark.parametrize("reentrant", [True, False, None])
def test_around_the_head(reentrant: bool | None, plan: str) -> None:
    mine, expected, run = Trained(), Trained(), again(reentrant)
    mine.model.load_state_dict(expected.model.state_dict())
    with MemoLoop(mine.model, torch.optim.SGD(mine.model.parameters(), lr=0.0), **PLANS[plan]):
        for n in range(3):
            for each in (mine, expected):
                each.step((lambda embeds, each=each: each.head(embeds, run)) if n == 2 else None)
            torch.testing.assert_close(gradients_of(mine.model), gradients_of(expected.model), rtol=1e-4, atol=1e-6)


def test_an_evaluation_inside_of_a_checkpoint_or_a_backward() -> None:
    mine = Trained()
    with MemoLoop(mine.model, torch.optim.SGD(mine.model.parameters(), lr=0.0), alpha=0.5):
        mine.step()
        found: list[Tensor] = []

        @torch.no_grad()
        def evaluate(t: Tensor) -> Tensor:
            found.append(mine.model(input_ids=mine.ids).logits)
            return t.clone()

        x = torch.ones(3, requires_grad=True)
        y = checkpoint(lambda t: (evaluate(t) * t).exp(), x, use_reentrant=False)
        y.register_hook(evaluate)
        y.sum().backward()
        assert len(found) == 3 and all(torch.equal(t, found[0]) for t in found)


OF_LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross entropy": lambda t, y: nn.functional.cross_entropy(t.flatten(0, 1), y.flatten()),
    "log-probabilities": lambda t, y: t.log_softmax(-1).gather(-1, y[..., None]).mean(),
    "all logits": lambda t, y: t.square().mean(),
}


@pytest.mark.parametrize("loss", OF_LOGITS)
@pytest.mark.parametrize("reentrant", [True, False])
def test_around_the_loss(reentrant: bool, loss: str) -> None:
    mine, expected = Trained(), Trained()
    mine.model.load_state_dict(expected.model.state_dict())
    with MemoLoop(mine.model, torch.optim.SGD(mine.model.parameters(), lr=0.0), **PLANS["half"]):
        for each in (mine, expected):
            logits = each.model(input_ids=each.ids).logits
            checkpoint(OF_LOGITS[loss], logits, each.ids, use_reentrant=reentrant).backward()
        torch.testing.assert_close(gradients_of(mine.model), gradients_of(expected.model), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [True, False])
def test_an_evaluation_that_is_checkpointed(reentrant: bool) -> None:
    mine = Trained()
    with MemoLoop(mine.model, torch.optim.SGD(mine.model.parameters(), lr=0.0), alpha=0.5):
        mine.step()
        with torch.no_grad():
            embeds = mine.model.get_input_embeddings()(mine.ids)
            assert torch.equal(again(reentrant)(mine.logits, embeds), mine.logits(embeds))


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
    "around, reentrant": (lambda: Around(True), ("PlainBlock runs inside of torch.utils.checkpoint", *OFF)),
    "around, not reentrant": (lambda: Around(False), ("PlainBlock runs inside of torch.utils.checkpoint", *OFF)),
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
        fit(
            MemoStrategy(alpha=0.5, slice_tokens=16, stream_from_host="hidden"),
            LanguageModel(lambda: layers(reentrant)),
        )
    assert_one_line(caught.value, *OFF)
    assert "stream_from_host" not in str(caught.value)


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
