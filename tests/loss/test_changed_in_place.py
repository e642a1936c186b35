"""Logits that are computed later than in plain training, while what they are computed from is changed in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.devices import DEVICE
from support.families import VOCABULARY, make_batch
from support.samples.chunked_models import build, chunked, lora
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from typing_extensions import override


def on_device() -> tuple[Tensor, Tensor]:
    batch = make_batch(2, 45)
    return batch["input_ids"].to(DEVICE), batch["labels"].to(DEVICE)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def log_probability(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, labels[..., None]).mean()


def deviation(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss that needs all logits."""
    return logits.std(-1).mean() + cross_entropy(logits, labels)


LOSSES = [cross_entropy, log_probability, deviation]


def value_head(hidden: Tensor) -> Tensor:
    return nn.Dropout(inplace=True)(hidden)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    "change",
    [
        value_head,
        lambda hidden: hidden.mul_(2),
        lambda hidden: hidden[:, :3].zero_(),
        lambda hidden: hidden.detach().transpose(0, 1)[0].add_(1),
        lambda hidden: torch.mul(hidden.detach(), 2, out=hidden.detach()),
    ],
)
def test_hidden_states_that_change_before_logits_are_used(change: Callable[[Tensor], Any], loss: Any) -> None:
    """With a frozen head, plain training needs the hidden states no more."""
    model, (ids, labels) = lora("q_proj").to(DEVICE), on_device()
    with chunked(model):
        output = model(input_ids=ids, output_hidden_states=True)
        change(output.hidden_states[-1])
        with pytest.raises(RuntimeError, match=r"^hidden states were changed in place after the forward, .*clone\(\)"):
            loss(output.logits, labels).backward()
        views = model(input_ids=ids, output_hidden_states=True)
        logits = views.logits[:, :40] / 0.7
        change(views.hidden_states[-1])
        with pytest.raises(RuntimeError, match=r"^hidden states were changed in place"):
            loss(logits, labels[:, :40])


def test_hidden_states_that_change_after_the_loss() -> None:
    """The gradient of a cross-entropy is computed in the forward."""
    model, (ids, labels) = lora("q_proj").to(DEVICE), on_device()

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        output = model(input_ids=ids, labels=labels, output_hidden_states=True)
        output.hidden_states[-1].detach().zero_()
        output.loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = run()
    with chunked(model):
        mine = run()
    for name, gradient in plain.items():
        torch.testing.assert_close(mine[name], gradient, msg=name)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_uses_the_hidden_states_of_the_forward(mode: Callable[[], Any], loss: Any) -> None:
    model, (ids, labels) = build("LlamaConfig").to(DEVICE), on_device()

    def run() -> Tensor:
        with mode():
            output = model(input_ids=ids, output_hidden_states=True)
            first = output.logits.view(-1, VOCABULARY).argmax(-1).sum()
            hidden = output.hidden_states[-1]
            hidden.div_(hidden.norm(dim=-1, keepdim=True))
            hidden.data[:, 3].zero_()
            return loss(output.logits, labels) + first + output.logits[:, 3].amax(-1).sum()

    plain = run()
    with chunked(model):
        torch.testing.assert_close(run(), plain)


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "write",
    [
        lambda z: z.select(1, 3).fill_(0),
        lambda z: z.detach().transpose(0, 1).zero_(),
        lambda z: z.mul_(2),
        lambda z: z[:, :3].mul_(3),
        lambda z: z[:, 0].zero_(),
        lambda z: z[..., :1, :][0].fill_(1.0),
        lambda z: z.view(-1, VOCABULARY).clamp_(-0.1, 0.1),
        lambda z: z[:, 1:].narrow(1, 2, 4).neg_(),
        lambda z: torch._foreach_mul_([z[1:]], 2.0),
        lambda z: F.relu(z, inplace=True),
        lambda z: torch.mul(z.detach(), 2, out=z.detach()),
        lambda z: [row.mul_(2) for row in z.detach().unbind(0)],
        lambda z: z.__setitem__((0, slice(2, 5)), 0.5),
        lambda z: z.data.mul_(0.5),
    ],
)
@pytest.mark.parametrize("gradient", [False, True])
def test_writes_into_logits_reach_all_views(
    mode: Callable[[], Any], write: Callable[[Tensor], Any], gradient: bool
) -> None:
    model, (ids, labels) = build("LlamaConfig").to(DEVICE), on_device()

    def run() -> list[Tensor]:
        with mode():
            logits = model(input_ids=ids).logits
            flat, later, first = logits.view(-1, VOCABULARY), logits[:, 1:], logits[:, 0]
            before = first.clone()
            with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
                write(logits)
            loss = flat.logsumexp(-1).mean() + cross_entropy(logits, labels) + later.std()
            found = torch.autograd.grad(loss, [*model.parameters()]) if loss.requires_grad else ()
            return [
                loss.detach(),
                before.detach(),
                first.detach().clone(),
                flat.detach().clone(),
                later.detach().clone(),
                *found,
            ]

    plain = run()
    with chunked(model):
        mine = run()
    for t, expected in zip(mine, plain, strict=True):
        torch.testing.assert_close(t, expected)


def test_data_of_logits() -> None:
    model, (ids, labels) = build("LlamaConfig").to(DEVICE), on_device()

    def run() -> tuple[Tensor, ...]:
        logits = model(input_ids=ids).logits
        view = logits[:, 1:]
        logits.data = logits.data * 0.5
        loss = cross_entropy(logits, labels) + view.std()
        return loss.detach(), *torch.autograd.grad(loss, [*model.parameters()])

    plain = run()
    with chunked(model):
        torch.testing.assert_close(run(), plain)
        with pytest.raises(ValueError, match=r"^logits \[2, 45, 96\] of torch.float32 got data \[2, 96\].*new tensor"):
            model(input_ids=ids).logits.data = torch.zeros(2, VOCABULARY)


@pytest.mark.parametrize("change", [lambda z: z.t_(), lambda z: z.unsqueeze_(0), lambda z: z.resize_(3)])
def test_shapes_that_change_in_place_are_refused(change: Callable[[Tensor], Any]) -> None:
    model, (ids, _) = build("LlamaConfig").to(DEVICE), on_device()
    with (
        chunked(model), torch.no_grad(),
        pytest.raises(RuntimeError, match=r"changed the shape of logits in place, .*loss_chunk_tokens=None"),
    ):  # fmt: skip
        change(model(input_ids=ids).logits.view(-1, VOCABULARY))


def test_a_view_of_logits_shows_what_is_written_into_it() -> None:
    model, (ids, labels) = build("LlamaConfig").to(DEVICE), on_device()
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with chunked(model):
            logits = model(input_ids=ids).logits
        for z in (plain, logits):
            z.select(1, 3).fill_(0)
    torch.testing.assert_close(cross_entropy(logits, labels), cross_entropy(plain, labels))


# ---- functions that autograd calls with logits


class Passes(torch.autograd.Function):
    """A loss that keeps its logits, and whose backward differentiates it."""

    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(logits, labels)
        return cross_entropy(logits, labels)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:  # type: ignore[override]
        logits, labels = ctx.saved_tensors
        leaf = logits.detach()
        leaf.requires_grad = logits.requires_grad
        with torch.enable_grad():
            (cross_entropy(leaf, labels) * gradient).backward()
        return leaf.grad, None


def reentrant(logits: Tensor, labels: Tensor) -> Tensor:
    return checkpoint(cross_entropy, logits, labels, use_reentrant=True)


def reentrant_parts(logits: Tensor, labels: Tensor) -> Tensor:
    pairs = zip((logits / 0.7).split(1), labels.split(1), strict=True)
    parts = [checkpoint(deviation, *pair, use_reentrant=True) for pair in pairs]
    return torch.stack(parts).sum() + checkpoint(log_probability, logits, labels, use_reentrant=False)


def checkpointed(logits: Tensor, labels: Tensor) -> Tensor:
    """Functions of all logits, run once more in the backward."""
    whole = checkpoint(lambda z: z.square().mean(), logits, use_reentrant=False)
    part = checkpoint(deviation, logits * 0.5, labels, use_reentrant=False)
    chunks = [checkpoint(loss, logits, labels, use_reentrant=False) for loss in (cross_entropy, log_probability)]
    logits.std()  # needs all of them before the functions run again
    return whole + part + sum(chunks)


class Doubled(torch.autograd.Function):
    """Changes logits in place."""

    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor) -> Tensor:  # type: ignore[override]
        ctx.mark_dirty(logits)
        return logits.mul_(2)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class Same(torch.autograd.Function):
    """Returns logits as they are, and has another gradient."""

    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor) -> Tensor:  # type: ignore[override]
        return logits

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * gradient


class Copied(Same):
    """As DDP passes all outputs through a function if it looks for unused parameters."""

    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor) -> Tensor:  # type: ignore[override]
        return logits.clone()


def dirty(logits: Tensor, labels: Tensor) -> Tensor:
    view = logits[:, 5:]
    assert Doubled.apply(logits) is logits
    return cross_entropy(logits, labels) + Doubled.apply(view[:, 1:]).std() + logits.std()


def passed_through(logits: Tensor, labels: Tensor) -> Tensor:
    same, copied = Same.apply(logits), Copied.apply(logits)
    return sum(cross_entropy(z, labels) + z.log_softmax(-1).std() for z in (same, same / 0.7, copied, logits))


def after_a_write(logits: Tensor, labels: Tensor) -> Tensor:
    logits.mul_(0.5)
    return Passes.apply(logits, labels)


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    """The gradient of the logits is computed apart from that of the model."""
    leaf = logits.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(cross_entropy(leaf, labels), leaf)
    return (logits * gradient).sum()


@pytest.mark.parametrize("trained", ["all", "layers", "head"])
@pytest.mark.parametrize(
    "loss",
    [reentrant, reentrant_parts, checkpointed, by_hand, dirty, passed_through, after_a_write, Passes.apply],
    ids=lambda f: f.__name__,
)
def test_functions_that_differentiate_logits_train_as_in_plain_training(loss: Any, trained: str) -> None:
    model, (ids, labels) = build("LlamaConfig").to(DEVICE), on_device()
    model.model.requires_grad_(trained != "head")
    model.lm_head.requires_grad_(trained != "layers")

    def run() -> dict[str, Tensor]:
        model.zero_grad()
        loss(model(input_ids=ids).logits, labels).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    plain = run()
    with chunked(model):
        mine = run()
    assert mine.keys() == plain.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(mine[name], gradient, msg=name)


def test_gradients_that_are_asked_for_pass_through_a_function_of_logits() -> None:
    model, (ids, labels) = build("LlamaConfig").to(DEVICE), on_device()

    def run() -> tuple[Tensor, ...]:
        loss = Passes.apply(model(input_ids=ids).logits, labels)
        return torch.autograd.grad(loss, [model.lm_head.weight, model.model.norm.weight])

    plain = run()
    with chunked(model):
        for mine, gradient in zip(run(), plain, strict=True):
            torch.testing.assert_close(mine, gradient)
    assert model.lm_head.weight.grad is None


def test_logits_that_a_function_saves_must_not_change() -> None:
    model, (ids, labels) = build("LlamaConfig").to(DEVICE), on_device()
    for context in (contextlib.nullcontext(), chunked(model)):
        with context:
            logits = model(input_ids=ids).logits
            loss = Passes.apply(logits, labels)
            with torch.no_grad():
                logits.select(1, 3).mul_(2)
            with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
                loss.backward()


def test_logits_computed_without_gradients_get_those_of_a_function() -> None:
    """A reentrant checkpoint computes them without a graph, and is itself their node."""
    model, (ids, labels) = build("LlamaConfig").to(DEVICE), on_device()

    def run() -> tuple[Tensor, ...]:
        embedded = model.get_input_embeddings()(ids)
        logits = checkpoint(lambda e: model(inputs_embeds=e).logits, embedded, use_reentrant=True)
        model.zero_grad()
        (cross_entropy(logits, labels) + logits.log_softmax(-1).std()).backward()
        return tuple(p.grad.clone() for p in model.parameters())

    plain = run()
    with chunked(model):
        torch.testing.assert_close(run(), plain)


@pytest.mark.parametrize(
    "hooked", [lambda z: z, lambda z: z[:, :-1], lambda z: z.view(-1, VOCABULARY), lambda z: z.float() / 0.7]
)
@pytest.mark.parametrize("loss", [deviation, log_probability, lambda z, labels: torch.log_softmax(z, -1).exp().std()])
def test_gradients_of_logits(hooked: Callable[[Tensor], Tensor], loss: Any) -> None:
    model, (ids, labels) = build("LlamaConfig").to(DEVICE), on_device()
    labels = labels.masked_fill(labels < 0, 0)

    def run() -> list[Tensor]:
        logits, seen = model(input_ids=ids).logits, list[Tensor]()
        t = hooked(logits)
        t.register_hook(lambda g: 0.5 * g)
        t.register_hook(lambda g: seen.append(g))
        t.retain_grad()
        value = (loss(logits, labels) if t is logits else t.std()) + logits.square().mean()
        value.backward(retain_graph=True)
        return [*seen, t.grad, *torch.autograd.grad(value, [t, model.lm_head.weight, model.model.norm.weight])]

    plain = run()
    with chunked(model):
        for mine, expected in zip(run(), plain, strict=True):
            torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize(
    "ask",
    [lambda z, _: z.register_hook(print), lambda z, _: z.retain_grad(), lambda z, loss: torch.autograd.grad(loss, z)],
)
@pytest.mark.parametrize("loss", [cross_entropy, log_probability, lambda z, _: (z / 0.7).std()])
def test_gradients_of_logits_that_a_loss_has_passed_by_are_refused(ask: Any, loss: Any) -> None:
    model, (ids, labels) = build("LlamaConfig").to(DEVICE), on_device()
    with chunked(model):
        logits = model(input_ids=ids).logits
        value = loss(logits, labels.masked_fill(labels < 0, 0))
        with pytest.raises(RuntimeError, match=r"^the gradient of logits is not computed as a whole.*before the loss"):
            ask(logits, value)


def test_logits_say_what_they_are() -> None:
    model, (ids, _) = build("LlamaConfig").to(DEVICE), on_device()

    def flags() -> list[Any]:
        logits = model(input_ids=ids).logits
        with torch.no_grad():
            apart = model(input_ids=ids).logits
        kinds = [logits, logits.float(), logits[:, :-1], logits / 2, logits.detach(), apart, logits.data]
        kinds += [logits.unbind(0)[1], logits.flatten(0, 1), logits[:, :-1].contiguous(), logits.view(logits.shape)]
        return [
            (
                *(t.requires_grad, t.is_leaf, t.grad_fn is None, t._base is logits, t._is_view()),
                *(t.is_contiguous(), t.stride(), t.storage_offset(), t._version, t.is_inference(), t.retains_grad),
            )
            for t in kinds
        ]

    for trained in (True, False):
        model.requires_grad_(trained)
        plain = flags()
        with chunked(model):
            assert flags() == plain
