"""Functions of the logits of each token, for example log-probabilities, in chunks, against all logits at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.devices import DEVICE
from support.families import VOCABULARY, make_batch
from support.markers.slow import slow_if
from support.samples.chunked_models import CHUNK, LARGE, MODELS, VocabularyWatch, build, chunked
from torch import Tensor, nn
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from lightning_memo.loss.lazy_logits import LazyLogits

# Computes a value from logits [batch, tokens, vocabulary] and ids [batch, tokens].
Function = Callable[[Tensor, Tensor], Tensor]


def log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    return F.log_softmax(logits[:, :-1], dim=-1).gather(-1, ids[:, 1:, None])[..., 0]


def in_full_precision(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.log_softmax(logits.float() / 0.7, 2).gather(2, ids.unsqueeze(2)).squeeze(2)


def by_logsumexp(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.gather(logits, -1, ids[..., None])[..., 0] - logits.logsumexp(-1)


def several_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    return selective_log_softmax(logits, torch.stack([ids, (ids + 5) % VOCABULARY], -1))


def entropy(logits: Tensor, ids: Tensor) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def entropy_by_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    return torch.logsumexp(logits, dim=-1) - torch.sum(F.softmax(logits, dim=-1) * logits, dim=-1)


def both(logits: Tensor, ids: Tensor) -> Tensor:
    return log_probabilities(logits, ids) * entropy(logits, ids)[:, :-1].detach() + 0.1 * entropy(logits, ids)[:, 1:]


def best(logits: Tensor, ids: Tensor) -> Tensor:
    values, places = logits.topk(4, dim=-1)
    return values[..., 0] - values[..., 3] + (places == ids[..., None]).any(-1) * values[..., 1]


def margin(logits: Tensor, ids: Tensor) -> Tensor:
    return logits.amax(-1) - logits.amax(dim=-1, keepdim=True).squeeze(-1) * 0.5


def squares(logits: Tensor, ids: Tensor) -> Tensor:
    return (logits.logsumexp(-1) ** 2) * (logits * logits).sum(-1)


FUNCTIONS: list[Function] = [
    log_probabilities, in_full_precision, by_logsumexp, several_tokens, entropy, entropy_by_softmax, both, best, margin,
    squares, lambda logits, ids: selective_log_softmax(logits, ids),
    lambda logits, ids: entropy_from_logits(logits, chunk_size=16),
]  # fmt: skip


@pytest.fixture
def no_whole_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(logits: LazyLogits) -> Tensor:
        raise AssertionError(f"{logits} were computed as a whole")

    monkeypatch.setattr(LazyLogits, "materialize", refuse)


def on_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.to(DEVICE) for name, t in batch.items()}


def run(model: nn.Module, function: Function) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the values of a function, and the gradients of a weighted sum of them."""
    batch = on_device(make_batch(3, 45))
    del batch["labels"]
    values = function(model(**batch).logits, batch["input_ids"])
    weights = torch.rand(values.shape, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    model.zero_grad()
    (values * weights).sum().backward()
    return values.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@slow_if(lambda name: name != "llama tied")
@pytest.mark.usefixtures("no_whole_logits")
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__.strip("<>"))
@pytest.mark.parametrize("name", ["llama tied", "gemma2", "llama lora on the head"])
def test_values_and_gradients_are_those_of_all_logits(name: str, function: Function) -> None:
    model = MODELS[name]().double().to(DEVICE)
    values, gradients = run(model, function)
    with chunked(model):
        found, found_gradients = run(model, function)
    torch.testing.assert_close(found, values, rtol=1e-6, atol=1e-6)  # where a function computes in fp32
    assert found_gradients.keys() == gradients.keys()
    for key, expected in gradients.items():
        torch.testing.assert_close(found_gradients[key], expected, rtol=1e-5, atol=1e-6, msg=key)


@pytest.mark.usefixtures("no_whole_logits")
def test_half_precision_is_that_of_all_logits() -> None:
    model = build("LlamaConfig").bfloat16().to(DEVICE)
    values, gradients = run(model, log_probabilities)
    with chunked(model):
        found, found_gradients = run(model, log_probabilities)
    assert torch.equal(found, values)
    for key, expected in gradients.items():
        error = (found_gradients[key].double() - expected.double()).norm() / expected.double().norm()
        assert error < 2**-7, key


@pytest.mark.usefixtures("no_whole_logits")
def test_without_gradients() -> None:
    model, batch = build("LlamaConfig").to(DEVICE), on_device(make_batch(2, 45))
    with torch.no_grad():
        plain = log_probabilities(model(**batch).logits, batch["input_ids"])
        with chunked(model):
            found = log_probabilities(model(**batch).logits, batch["input_ids"])
    torch.testing.assert_close(found, plain)
    assert not found.requires_grad


@pytest.mark.usefixtures("no_whole_logits")
def test_a_backward_that_is_repeated() -> None:
    model, batch = build("LlamaConfig").to(DEVICE), on_device(make_batch(2, 45))
    with chunked(model):
        values = log_probabilities(model(**batch).logits, batch["input_ids"])
        first, second = (torch.autograd.grad(values.sum(), model.lm_head.weight, retain_graph=True)[0] for _ in "ab")
    assert torch.equal(first, second)


@pytest.mark.parametrize("change", ["ids", "hidden states"])
def test_what_the_backward_reads_again_must_not_change(change: str) -> None:
    model, batch = build("LlamaConfig").to(DEVICE), on_device(make_batch(2, 45))
    ids = batch["input_ids"].clone()
    with chunked(model):
        logits = model(**batch).logits
        values = logits.log_softmax(-1).gather(-1, ids[..., None])
        with torch.no_grad():
            (ids if change == "ids" else logits.hidden_states).add_(1)
        with pytest.raises(RuntimeError, match="were changed in place before their backward"):
            values.sum().backward()


@pytest.mark.usefixtures("no_whole_logits")
def test_autocast_is_that_of_the_call() -> None:
    """On a GPU, autocast computes a softmax in full precision, in the backward, too."""
    model = build("LlamaConfig").to(DEVICE)

    def within(logits: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return log_probabilities(logits.bfloat16(), ids)

    values, gradients = run(model, within)
    with chunked(model):
        found, found_gradients = run(model, within)
    assert found.dtype == values.dtype == (torch.float32 if DEVICE.type == "cuda" else torch.bfloat16)
    torch.testing.assert_close(found, values)
    for key, expected in gradients.items():
        torch.testing.assert_close(found_gradients[key], expected, msg=key)


def test_weights_that_change_before_the_backward_are_noticed() -> None:
    model, batch = build("LlamaConfig").to(DEVICE), on_device(make_batch(2, 45))
    with chunked(model):
        values = log_probabilities(model(**batch).logits, batch["input_ids"])
        with torch.no_grad():
            model.lm_head.weight.mul_(2.0)
        with pytest.raises(RuntimeError):
            values.sum().backward()


@pytest.mark.parametrize("function", [log_probabilities, entropy, several_tokens], ids=lambda f: f.__name__)
def test_no_more_logits_exist_than_those_of_a_chunk(function: Function) -> None:
    model = build("LlamaConfig", vocab_size=LARGE).to(DEVICE)
    with chunked(model, 4 * CHUNK), VocabularyWatch() as watch:
        run(model, function)
    assert 0 < watch.largest_tokens <= CHUNK
    assert watch.peak_bytes <= 2 * 4 * CHUNK * LARGE * 4  # eight copies of a quarter of a chunk


@pytest.mark.parametrize(
    "function",
    [
        lambda logits: logits.sum(),
        lambda logits: logits.sum(1),
        lambda logits: logits.softmax(1),
        lambda logits: logits.std(-1),
        lambda logits: logits - logits.logsumexp(-1, keepdim=True),
        lambda logits: logits.gather(1, torch.zeros(2, 1, VOCABULARY, dtype=torch.long, device=DEVICE)),
        lambda logits: logits[0] * logits[1],
        lambda logits: logits.unbind(1)[3],
        lambda logits: logits.unbind(dim=1)[3],
        lambda logits: logits.unbind(dim=-3)[1],
        lambda logits: torch.split(logits, [1, 1])[1],
        lambda logits: torch.split(logits, 20, dim=1)[2],
        lambda logits: logits.split(split_size=1)[1],
        lambda logits: torch.softmax(logits, -1, out=torch.empty(0, device=DEVICE)),
        lambda logits: F.softmax(logits, -1, 3, torch.float64),
        lambda logits: torch.log_softmax(input=logits, dim=2),
        lambda logits: logits.sum(axis=-1),
        lambda logits: logits.amax((1, 2)),
        lambda logits: torch.topk(logits, 3, 1).values,
    ],
)
def test_other_functions_get_real_logits(function: Callable[[Any], Tensor]) -> None:
    model, batch = build("LlamaConfig").to(DEVICE), on_device(make_batch(2, 45))
    with torch.no_grad():  # which `out` needs
        plain = function(model(**batch).logits)
        with chunked(model):
            found = function(model(**batch).logits)
        found = found.materialize() if isinstance(found, LazyLogits) else found
    torch.testing.assert_close(found, plain)
