"""Several backwards through one graph (`retain_graph`), and backwards through a part of it, whatever the plan."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.architectures.hybrids import make_hybrid
from support.families import FAMILIES, make_batch
from support.harness import (
    DELAYS,
    Batch,
    EngineUnderTest,
    Step,
    assert_close,
    assert_equal,
    beside,
    gradients_of,
    loss_and_gradients,
    on_device,
)
from support.samples.storage_kinds import TOKENS, ByKind, everything
from torch import Tensor, nn

from lightning_memo.engine import TestMode
from lightning_memo.utils.find_layers import find_stacks

BATCH, BATCH_OF_KINDS = make_batch(2, 48), make_batch(2, TOKENS)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return (make_hybrid(name) if name.endswith("Config") else FAMILIES[name].build()).train()


def _layers(model: nn.Module) -> list[nn.Module]:
    return list(find_stacks(model)[0].layers)


def adaptive_weight(model: nn.Module, batch: Batch) -> Tensor:
    """The weight of a loss is the ratio of two gradients of the last layer, as in VQGAN."""
    hidden: list[Tensor] = []
    handle = _layers(model)[-1].register_forward_hook(lambda m, args, out: hidden.append(_tensor(out)))
    loss = model(**batch).loss
    handle.remove()
    other, last = hidden[0].float().pow(2).mean(), [p for p in _layers(model)[-1].parameters() if p.dim() == 2][-1]
    first, second = (torch.autograd.grad(each, last, retain_graph=True)[0].norm() for each in (loss, other))
    total = loss + first / second * other
    total.backward()
    return total


def twice(model: nn.Module, batch: Batch) -> Tensor:
    loss = model(**batch).loss
    loss.backward(retain_graph=True)
    (0.5 * loss).backward()
    return loss


def inner_layer_first(model: nn.Module, batch: Batch) -> Tensor:
    """Gradients of a layer in the middle, of the input of the model, and of everything."""
    table = model.get_input_embeddings().weight if hasattr(model, "get_input_embeddings") else model.embed.weight
    loss = model(**batch).loss
    middle = list(_layers(model)[1].parameters())
    norms = [g.norm() for g in torch.autograd.grad(loss, middle, retain_graph=True)]
    norms.append(torch.autograd.grad(loss, table, retain_graph=True)[0].norm())
    (loss * torch.stack(norms).sum()).backward()
    return loss


def one_layer_after_another(model: nn.Module, batch: Batch) -> Tensor:
    loss = model(**batch).loss
    for layer in reversed(_layers(model)):
        loss.backward(inputs=list(layer.parameters()), retain_graph=True)
    return loss


def two_forwards(model: nn.Module, batch: Batch) -> Tensor:
    first, second = model(**batch).loss, model(**{name: t.flip(0) for name, t in batch.items()}).loss
    first.backward(retain_graph=True)
    (first * second).backward()
    return second


def _tensor(output: object) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


FORMS = [adaptive_weight, twice, inner_layer_first, one_layer_after_another, two_forwards]
MODELS = ["llama", "block_dropout", "encoder_layer_dropout", "gpt2_dropout", "Qwen3NextConfig"]
Form = Callable[[nn.Module, Batch], Tensor]


def run(model: nn.Module, form: Form, amp: bool = False, batch: Batch = BATCH) -> tuple[Step, Tensor]:
    """The loss and the gradients of a step, and the random state that it leaves."""
    on_device(model).zero_grad()
    torch.manual_seed(5)
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=amp):
        loss = form(model, {name: t.to(device) for name, t in batch.items()})
    return Step(loss.detach().clone(), gradients_of(model)), torch.get_rng_state()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_slots(name: str, form: Form) -> None:
    model, rounded = build(name), name == "Qwen3NextConfig"  # whose heads of queries share keys
    plain, random_state = run(model, form)
    with EngineUnderTest(model) as under_test:
        (assert_close if rounded else assert_equal)(run(model, form)[0], plain)  # the step that is profiled
        under_test.assert_empty()
        under_test.engine.unload()
        under_test.profile_step(BATCH)
        for alpha in (0.0, 0.5, 1.0):
            under_test.load(alpha)
            for _ in range(2):
                actual, random_state_with_engine = run(model, form)
                (assert_close if rounded or alpha == 0.5 else assert_equal)(actual, plain)
                assert torch.equal(random_state_with_engine, random_state)
                under_test.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stream_from_host", ["attention", "hidden"])
def test_slices_on_the_host(stream_from_host: str, form: Form) -> None:
    model = build("llama_gqa")
    plain, _ = run(model, form)
    with EngineUnderTest(model, slice_tokens=16, stream_from_host=stream_from_host) as under_test:
        under_test.profile_step(BATCH)
        under_test.load(0.5)
        for _ in range(2):
            assert_close(run(model, form)[0], plain)
            under_test.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("nested", [False, True])
def test_storage_by_kinds(nested: bool, form: Form) -> None:
    model = build("llama_gqa")
    plain, _ = run(model, form, batch=BATCH_OF_KINDS)
    with ByKind(model, joint_attention=nested) as under_test:
        under_test.profile_step(BATCH_OF_KINDS)
        under_test.load_storage(everything(under_test.products, nested))
        for _ in range(2):
            assert_close(run(model, form, batch=BATCH_OF_KINDS)[0], plain)
            under_test.assert_empty()


@pytest.mark.parametrize("form", [adaptive_weight, twice])
def test_autocast_and_late_copies(form: Form) -> None:
    """Copies of weights are made once more, and slots that are on their way are not overwritten."""
    model = build("llama")
    plain, _ = run(model, form, amp=True)
    with EngineUnderTest(model, test_mode=TestMode(seed=2, longest_delay_seconds=0.003)) as under_test:
        under_test.profile_step(BATCH, amp=True)
        for alpha in (0.0, 1.0):
            under_test.load(alpha)
            assert_equal(run(model, form, amp=True)[0], plain)
            under_test.assert_empty()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_a_graph_that_gets_no_last_backward(alpha: float) -> None:
    model = build("block_dropout")
    plain = loss_and_gradients(model, BATCH)
    with EngineUnderTest(model, test_mode=DELAYS) as under_test:
        under_test.profile_step(BATCH)
        under_test.load(alpha)
        kept = []
        for _ in range(3):  # the graph of the step before lives during the next one
            loss = model(**beside(model, BATCH)).loss
            loss.backward(retain_graph=True)
            kept = [loss]
        del loss, kept
        under_test.assert_empty()
        (assert_close if alpha == 0.5 else assert_equal)(under_test.step(BATCH), plain)
