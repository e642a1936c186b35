"""The loss of a model's logits in chunks of tokens, against the same model with all logits at once."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import VOCABULARY, make_batch
from support.harness import Batch, Step, assert_close, assert_equal, gradients_of, in_double, loss_and_gradients
from support.samples.chunked_models import (
    CHUNK,
    MODELS,
    SOFTCAP,
    build,
    chunked,
)
from torch import Tensor, nn

from lightning_memo.loss.attach_loss import attach_chunked_loss
from lightning_memo.loss.lazy_logits import LazyLogits


@pytest.mark.usefixtures("only_chunks")
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_all_logits(name: str) -> None:
    model, batch = MODELS[name](), make_batch(2, 45, padded=True)
    plain = loss_and_gradients(model, batch)
    with chunked(model):
        assert_close(loss_and_gradients(model, batch), plain)
        assert isinstance(model(**batch).logits, LazyLogits)
    assert not isinstance(model(**batch).logits, LazyLogits)


def test_batches_of_one_chunk_are_left_as_they_are() -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 45)
    plain = loss_and_gradients(model, batch)
    with chunked(model, 90):
        assert_equal(loss_and_gradients(model, batch), plain)
        assert type(model(**batch).logits) is Tensor


@pytest.mark.usefixtures("only_chunks")
@pytest.mark.parametrize(
    "change",
    [
        lambda batch: {"num_items_in_batch": torch.tensor(31.0)},
        lambda batch: {"num_items_in_batch": 31},
        lambda batch: {"shift_labels": batch["labels"].roll(-3, 1)},
        lambda batch: {"labels": batch["labels"].masked_fill(batch["labels"] % 2 == 0, -5), "ignore_index": -5},
        lambda batch: {"labels": torch.full_like(batch["labels"], -100)},
        lambda batch: {"labels": torch.full_like(batch["labels"], -100), "num_items_in_batch": 1},
    ],
    ids=["items", "items as int", "shifted labels", "ignored label", "all ignored", "all ignored of one"],
)
def test_arguments_of_the_loss(change: Callable[[Batch], dict[str, Any]]) -> None:
    model, batch = build("LlamaConfig"), make_batch(3, 23)
    batch |= change(batch)
    plain = loss_and_gradients(model, batch)
    with chunked(model):
        mine = loss_and_gradients(model, batch)
    torch.testing.assert_close(mine.loss, plain.loss, rtol=1e-6, atol=0, equal_nan=True)
    if plain.norm() > 0:
        assert_close(mine, plain)
    else:
        assert_equal(mine._replace(loss=torch.zeros(())), plain._replace(loss=torch.zeros(())))


def test_gradient_of_the_loss_and_hooks_on_weights() -> None:
    model, batch, heard = build("LlamaConfig"), make_batch(2, 23), []

    def gradients() -> Step:
        model.zero_grad()
        loss = model(**batch).loss
        (3.0 * loss.square()).backward()
        return Step(loss.detach(), gradients_of(model))

    handle = model.lm_head.weight.register_hook(lambda g: heard.append(g) or 2.0 * g)
    plain = gradients()
    with chunked(model):
        assert_close(gradients(), plain)
    handle.remove()
    assert len(heard) == 2


def test_frozen_parts_get_no_gradients() -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 23)
    model.model.requires_grad_(False)
    plain = loss_and_gradients(model, batch)
    with chunked(model):
        assert_close(loss_and_gradients(model, batch), plain)
        model.requires_grad_(False)
        assert not model(**batch).loss.requires_grad


@pytest.mark.usefixtures("only_chunks")
def test_losses_that_users_write() -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 45)
    ids, labels = batch["input_ids"], batch["labels"]
    mask = torch.arange(44) < torch.tensor([[44], [31]])
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda z: F.cross_entropy(z[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)),
        lambda z: F.cross_entropy(z.float()[..., :-1, :].contiguous().view(-1, VOCABULARY), labels[:, 1:].reshape(-1)),
        lambda z: nn.CrossEntropyLoss(reduction="sum")(z.flatten(0, 1), labels.flatten()),
        lambda z: F.cross_entropy((z[:, :-1] / 2.0)[mask], labels[:, 1:][mask], ignore_index=3),
        lambda z: F.cross_entropy(torch.tanh(z[1]), labels[1]),
    ]
    for number, loss in enumerate(losses):
        steps = []
        for attach in (False, True):
            model.zero_grad()
            undo = attach_chunked_loss(model, CHUNK) if attach else []
            logits = model(input_ids=ids).logits
            assert isinstance(logits, LazyLogits) == attach
            value = loss(logits)
            value.backward()
            steps.append(Step(value.detach(), gradients_of(model)))
            for u in undo:
                u()
        assert_close(steps[1], steps[0]), number


def logits_of(model: nn.Module, batch: Batch) -> tuple[LazyLogits, Tensor]:
    real = model(**batch).logits * 1.0
    with chunked(model):
        lazy = model(**batch).logits
    assert isinstance(lazy, LazyLogits)
    return lazy, real


@pytest.mark.parametrize(
    "use",
    [
        lambda z: z.softmax(-1).clone(),
        lambda z: z[0, -1].std(),
        lambda z: z[:, :, 5:9],
        lambda z: z[:, -1:].argmax(-1),
        lambda z: z.argmax(-1),
        lambda z: z[:, :-1].detach().argmax(dim=-1) == 3,
        lambda z: z.float().log_softmax(-1).gather(-1, torch.zeros(2, 23, 1, dtype=torch.long)),
        lambda z: F.cross_entropy(z.transpose(1, 2), torch.zeros(2, 23, dtype=torch.long)),
        lambda z: F.cross_entropy(z.view(-1, VOCABULARY), torch.zeros(46, dtype=torch.long), label_smoothing=0.1),
        lambda z: torch.cat([z, z], 1),
        lambda z: 1.0 - z,
        lambda z: z.detach().cpu().numpy().sum(),
        lambda z: pickle.loads(pickle.dumps(z.detach())),
        lambda z: copy.deepcopy(z.detach()),
        lambda z: [*z][1].clone(),
        lambda z: z.mul_(2.0).sum(),
        lambda z: z.data.max(),
        lambda z: torch.topk(z, 3).indices,
        lambda z: z.shape == (2, 23, VOCABULARY) and z.size(-1) == VOCABULARY and torch.is_tensor(z) and z.device.type,
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_whatever_else_is_done_with_logits(use: Callable[[Tensor], Any], grad: bool) -> None:
    lazy, real = logits_of(build("Gemma2Config", **SOFTCAP), make_batch(2, 23))
    with torch.set_grad_enabled(grad):
        mine, theirs = use(lazy), use(real)
    if not isinstance(theirs, Tensor):
        assert mine == theirs or mine == pytest.approx(theirs, rel=1e-5)
        return
    torch.testing.assert_close(mine, theirs)
    assert not grad or mine.requires_grad == theirs.requires_grad
    assert type(mine) is Tensor


def test_gradients_flow_through_computed_logits() -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 23)

    def gradients() -> Step:
        model.zero_grad()
        out = model(**batch)
        loss = out.loss + 0.1 * out.logits.logsumexp(-1).square().mean()
        loss.backward()
        return Step(loss.detach(), gradients_of(model))

    plain = gradients()
    with chunked(model):
        assert_close(gradients(), plain)


class OwnCrossEntropy(torch.autograd.Function):
    """Computes its gradient by itself, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        ctx.save_for_backward(logits.softmax(-1) - F.one_hot(labels, logits.shape[-1]))
        return -logits.log_softmax(-1).gather(-1, labels[..., None]).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return grad * difference, None


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_autograd_functions_of_users(frozen: bool, others: bool) -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 23)
    if frozen:
        model.model.requires_grad_(False)

    def gradients() -> Step:
        model.zero_grad()
        out = model(input_ids=batch["input_ids"])
        loss = OwnCrossEntropy.apply(out.logits.float()[:, :-1].contiguous(), batch["labels"][:, 1:])
        if others:
            loss = loss + out.logits.logsumexp(-1).square().mean()
        loss.backward()
        return Step(loss.detach(), gradients_of(model))

    plain = gradients()
    with chunked(model):
        assert_close(gradients(), plain)


def test_logits_are_computed_once_and_stay_real() -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 23)
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.__setitem__((..., 0), -9.0))
    plain = loss_and_gradients(model, batch)
    with chunked(model):  # the hook's change affects the loss
        assert_equal(loss_and_gradients(model, batch)._replace(gradients={}), plain._replace(gradients={}))
        assert model(**batch).logits.materialize()[0, 0, 0] == -9.0


@pytest.mark.usefixtures("only_chunks")
def test_a_few_logits_are_computed_by_themselves() -> None:
    lazy, real = logits_of(build("LlamaConfig"), make_batch(2, 23))
    for use in (
        lambda t: t[:, -1].clone(),
        lambda t: t[:, -1].argmax(-1),
        lambda t: t[:, -1].float().softmax(-1).amax(-1),
        lambda t: t[0, -2:].to(torch.float64, copy=True),
        lambda t: t[:, 3].detach().tolist(),
        lambda t: t[:, 3].log_softmax(-1).detach().clone(),
    ):
        mine, theirs = (t.clone() if isinstance(t, LazyLogits) else t for t in (use(lazy), use(real)))
        torch.testing.assert_close(mine, theirs)


def test_writing_into_chosen_logits_that_are_copies() -> None:
    lazy, _ = logits_of(build("LlamaConfig"), make_batch(2, 23))
    before = lazy[:, 0].clone()
    lazy[:, torch.tensor([0, 1])].zero_()
    lazy[:, -1].clone().zero_()
    torch.testing.assert_close(lazy.materialize()[:, 0], before)


@pytest.mark.parametrize(
    "function",
    [
        torch.vmap(F.cross_entropy),
        lambda z, ids: torch.func.grad(lambda t: F.cross_entropy(t, ids.flatten()))(z.flatten(0, 1)),
    ],
)
def test_transforms_of_functions(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    batch = make_batch(2, 23)
    lazy, real = logits_of(build("LlamaConfig"), batch)
    torch.testing.assert_close(function(lazy, batch["input_ids"]), function(real, batch["input_ids"]))


@pytest.mark.usefixtures("only_chunks")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("around", [False, True])
def test_dtype_of_a_loss_of_half_precision(around: bool, reduction: str) -> None:
    model, batch = build("LlamaConfig"), make_batch(2, 23)

    def run() -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=batch["input_ids"]).logits.flatten(0, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            loss = F.cross_entropy(logits, batch["input_ids"].flatten(), reduction=reduction)
        return loss, *torch.autograd.grad(torch.stack([loss, loss]).sum(), [model.lm_head.weight])

    plain = run()
    with chunked(model):
        loss, gradient = run()
    torch.testing.assert_close(loss, plain[0], rtol=2**-7, atol=0)
    assert (gradient - plain[1]).norm() < 2**-6 * plain[1].norm()  # of logits that are rounded
    assert plain[0].dtype == (torch.float32 if around else torch.bfloat16)


def test_logits_of_weights_that_are_gone_are_refused() -> None:
    model = build("LlamaConfig")
    with chunked(model):
        model(**make_batch(2, 23)).loss.backward()
        logits = model(**make_batch(2, 23)).logits
        torch.optim.SGD(model.model.parameters(), lr=0.1).step()
        logits.argmax(-1)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        for use in (lambda: logits.sum(), lambda: logits.argmax(-1)):
            with pytest.raises(
                RuntimeError, match=r"Linear.weight was changed since the forward.*loss_chunk_tokens=None"
            ):
                use()


def test_second_backward() -> None:
    model, batch, found = build("LlamaConfig"), make_batch(2, 23), []
    for context in (contextlib.nullcontext(), chunked(model)):
        with context:
            model.zero_grad()
            loss = model(**batch).loss
            (gradient,) = torch.autograd.grad(loss, model.lm_head.weight, retain_graph=True)
            loss.backward(retain_graph=True)
            (loss * gradient.norm()).backward()
            found.append(Step(loss.detach().clone(), gradients_of(model)))
    assert_close(found[1], found[0])


def test_hooks_on_the_head_and_the_model() -> None:
    model, batch, shapes = build("LlamaConfig"), make_batch(2, 23), []
    model.register_forward_hook(lambda module, args, out: shapes.append(out.logits.shape))
    handles = [model.lm_head.register_forward_hook(lambda module, args, out: out * 0.5)]
    plain = loss_and_gradients(model, batch)
    with chunked(model):
        assert_close(loss_and_gradients(model, batch), plain)
    handles.append(model.lm_head.register_full_backward_hook(lambda module, dx, dy: (2.0 * dx[0],)))
    plain = loss_and_gradients(model, batch)
    with chunked(model):  # the gradient of the logits is available
        assert_close(loss_and_gradients(model, batch), plain)
    assert set(shapes) == {(2, 23, VOCABULARY)}


@pytest.fixture
def default_dtype() -> Iterator[Callable[[torch.dtype], None]]:
    """Sets the default type, as Lightning does in steps of bf16-true."""
    yield torch.set_default_dtype
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_half_precision_is_as_close_to_fp64_as_without_chunks(
    name: str, precision: str, default_dtype: Callable[[torch.dtype], None]
) -> None:
    model, batch, amp = MODELS[name](), make_batch(2, 100), precision == "bf16-mixed"
    if not amp:
        model = model.bfloat16()
    exact = loss_and_gradients(in_double(model), batch)
    if not amp:
        default_dtype(torch.bfloat16)
    plain = loss_and_gradients(model, batch, amp)
    with chunked(model):
        mine = loss_and_gradients(model, batch, amp)
    assert mine.distance(exact) <= 1.1 * plain.distance(exact)
    torch.testing.assert_close(mine.loss, plain.loss, rtol=1e-5, atol=0, check_dtype=True)
    assert {n: g.dtype for n, g in mine.gradients.items()} == {n: g.dtype for n, g in plain.gradients.items()}
