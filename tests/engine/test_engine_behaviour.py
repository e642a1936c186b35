"""Training loops with more than one forward and one backward, and models that are not plain stacks of layers."""

from __future__ import annotations

import copy
import gc
import io
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.alpha_plans import alpha_swap
from support.families import BALANCED, FAMILIES, VOCABULARY, PlainBlock, PlainModel, make_batch
from support.harness import (
    Batch,
    EngineUnderTest,
    Step,
    assert_close,
    assert_equal,
    assert_trains_like_plain,
    gradients_of,
    loss_and_gradients,
    planned,
)
from support.markers.slow import slow_if
from torch import Tensor, nn

TOKENS = 48
ALPHAS = (0.0, 0.5, 1.0)
BATCHES = [make_batch(2, TOKENS, seed=seed) for seed in range(3)]

each_alpha = pytest.mark.parametrize("alpha", ALPHAS, ids=lambda alpha: f"alpha{alpha:g}")
each_family = pytest.mark.parametrize("family", ["llama", "gpt2_dropout"])


class DeliberateError(Exception):
    """Raised by a hook."""


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family].build().train()


def assert_agrees(actual: Step, plain: Step, alpha: float) -> None:
    """Bit-identical if a layer runs as one slice; otherwise equal up to rounding."""
    (assert_equal if alpha in (0.0, 1.0) else assert_close)(actual, plain)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


# ---- several forwards and backwards


def _sum_of_two(model: nn.Module) -> Tensor:
    loss = model(**BATCHES[0]).loss + model(**BATCHES[1]).loss
    loss.backward()
    return loss


def _first_forward_first(model: nn.Module) -> Tensor:
    first, second = model(**BATCHES[0]).loss, model(**BATCHES[1]).loss
    first.backward()
    second.backward()
    return first + second


def _last_forward_first(model: nn.Module) -> Tensor:
    first, second = model(**BATCHES[0]).loss, model(**BATCHES[1]).loss
    second.backward()
    first.backward()
    return first + second


def _accumulation(model: nn.Module) -> Tensor:
    total = torch.zeros(())
    for batch in BATCHES:
        loss = model(**batch).loss / len(BATCHES)
        loss.backward()
        total += loss.detach()
    return total


def _forwards_and_backwards_interleaved(model: nn.Module) -> Tensor:
    first, second = model(**BATCHES[0]).loss, model(**BATCHES[1]).loss
    first.backward()
    third = model(**BATCHES[2]).loss
    second.backward()
    third.backward()
    return first + second + third


slow_pair = slow_if(lambda family, alpha: (family, alpha) not in (("llama", 0.5), ("gpt2_dropout", 0.0)))

each_loop = pytest.mark.parametrize(
    "loop",
    [_sum_of_two, _first_forward_first, _last_forward_first, _accumulation, _forwards_and_backwards_interleaved],
    ids=lambda loop: loop.__name__.strip("_"),
)


def run_loop(model: nn.Module, loop: Callable[[nn.Module], Tensor]) -> tuple[Step, Tensor]:
    """Loss and gradients of a training loop, and the random state that it leaves."""
    model.zero_grad()
    torch.manual_seed(5)
    loss = loop(model).detach().clone()
    return Step(loss, gradients_of(model)), torch.get_rng_state()


@slow_pair
@each_family
@each_alpha
@each_loop
def test_loops(family: str, alpha: float, loop: Callable[[nn.Module], Tensor]) -> None:
    model = build(family)
    plain, random_state = run_loop(model, loop)
    with EngineUnderTest(model) as under_test:
        profiled, random_state_with_engine = run_loop(model, loop)
        assert_equal(profiled, plain)
        assert torch.equal(random_state_with_engine, random_state)
        under_test.assert_empty()
        under_test.profile = under_test.engine.profile
        under_test.load(alpha)
        for _ in range(2):
            actual, random_state_with_engine = run_loop(model, loop)
            assert_agrees(actual, plain, alpha)
            assert torch.equal(random_state_with_engine, random_state)
            under_test.assert_empty()
        assert under_test.engine.profile is None


@slow_if(lambda alpha: alpha != 0.5)
@each_alpha
@each_loop
def test_more_forwards_before_a_backward_than_planned(alpha: float, loop: Callable[[nn.Module], Tensor]) -> None:
    model = build("llama")
    plain, _ = run_loop(model, loop)
    with planned(model, BATCHES[0], alpha) as under_test:
        for _ in range(2):
            actual, _ = run_loop(model, loop)
            assert_close(actual, plain)
            under_test.assert_empty()
        replanned = loop is not _accumulation  # whose forwards come one at a time, as planned
        assert (under_test.engine.profile is not None) == replanned


@slow_pair
@each_family
@each_alpha
def test_losses_may_be_kept_after_their_backward(family: str, alpha: float) -> None:
    model = build(family)
    plain = loss_and_gradients(model, BATCHES[0])
    with planned(model, BATCHES[0], alpha) as under_test:
        kept = []
        for _ in range(3):
            kept.append(model(**BATCHES[0]).loss)
            kept[-1].backward()
            under_test.assert_empty()
        assert_agrees(under_test.step(BATCHES[0]), plain, alpha)
        assert under_test.engine.profile is None
        under_test.assert_as_planned()


@each_alpha
def test_second_derivatives_are_refused(alpha: float) -> None:
    model = build("llama")
    plain = loss_and_gradients(model, BATCHES[0])
    with planned(model, BATCHES[0], alpha) as under_test:
        loss = model(**BATCHES[0]).loss
        with pytest.raises(RuntimeError, match=r"^second derivatives \(create_graph=True\) are not supported, [^\n]*$"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        del loss
        assert_agrees(under_test.step(BATCHES[0]), plain, alpha)


@each_alpha
def test_gradients_of_the_last_layer_leave_other_forwards_as_they_are(alpha: float) -> None:
    model = build("llama")
    last = list(model.model.layers[-1].parameters())

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        first, second = model(**BATCHES[0]).loss, model(**BATCHES[1]).loss
        found = torch.autograd.grad(first, last)
        third = model(**BATCHES[0]).loss
        second.backward()
        third.backward()
        return [*found, *(p.grad.clone() for p in model.parameters())]

    expected = gradients()
    with planned(model, BATCHES[0], alpha) as under_test:
        for _ in range(2):
            for found, plain in zip(gradients(), expected, strict=True):
                torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-6)
        under_test.assert_empty()


# ---- steps that do not reach their end


def fail(*_: object) -> None:
    raise DeliberateError


def run_until_failure(model: nn.Module) -> None:
    """A step whose hook raises; the error and the graph are gone when this returns."""
    failed = False
    try:
        model(**BATCHES[0]).loss.backward()
    except DeliberateError:
        failed = True
    assert failed


@slow_pair
@each_family
@each_alpha
@pytest.mark.usefixtures("no_garbage_collection")
def test_step_after_a_failed_forward(family: str, alpha: float) -> None:
    model = build(family)
    plain = loss_and_gradients(model, BATCHES[0])
    with planned(model, BATCHES[0], alpha) as under_test:
        for layer in under_test.engine.layers:
            hook = layer.mlp.register_forward_hook(fail)
            run_until_failure(model)
            hook.remove()
            under_test.assert_empty()
        for _ in range(2):
            assert_agrees(under_test.step(BATCHES[0]), plain, alpha)
        under_test.assert_as_planned()


@slow_pair
@each_family
@each_alpha
@pytest.mark.parametrize("reset", [False, True], ids=["alone", "with_reset"])
def test_step_after_a_failed_backward(family: str, alpha: float, reset: bool) -> None:
    """PyTorch keeps the rest of a failed backward until the next one, so that the engine has to release its memory."""
    model = build(family)
    plain = loss_and_gradients(model, BATCHES[0])
    with planned(model, BATCHES[0], alpha) as under_test:
        for layer in under_test.engine.layers:
            hook = next(p for name, p in layer.named_parameters() if "mlp" in name).register_hook(fail)
            run_until_failure(model)
            hook.remove()
            if reset:
                under_test.engine.reset()
                under_test.assert_empty()
            for _ in range(2):
                assert_agrees(under_test.step(BATCHES[0]), plain, alpha)
        assert under_test.engine.profile is None
        under_test.assert_as_planned()


@slow_pair
@each_family
@each_alpha
@pytest.mark.usefixtures("no_garbage_collection")
def test_dropped_graph_gives_its_memory_back(family: str, alpha: float) -> None:
    model = build(family)
    plain = loss_and_gradients(model, BATCHES[0])
    with planned(model, BATCHES[0], alpha) as under_test:
        loss = model(**BATCHES[0]).loss
        assert under_test.engine.slots_in_use > 0
        del loss
        under_test.assert_empty()
        loss = model(**BATCHES[0]).loss
        torch.autograd.grad(loss, list(under_test.engine.layers[-1].parameters()))  # reaches no other layer
        del loss
        under_test.assert_empty()
        assert_agrees(under_test.step(BATCHES[0]), plain, alpha)
        under_test.assert_as_planned()


class DecayingBlock(PlainBlock):
    """Its gate is the output of an operation on a weight, which saves that output."""

    def __init__(self) -> None:
        super().__init__(32, 4)
        self.decay = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) * self.decay.exp() * torch.softmax(self.decay, 0)


@each_alpha
@pytest.mark.usefixtures("no_garbage_collection")
def test_functions_of_weights_do_not_keep_a_dropped_graph_alive(alpha: float) -> None:
    model = PlainModel([DecayingBlock() for _ in range(3)])
    plain = loss_and_gradients(model, BATCHES[0])
    with EngineUnderTest(model) as under_test:
        model(**BATCHES[0])
        under_test.assert_empty()
        under_test.profile_step(BATCHES[0])
        under_test.load(alpha)
        model(**BATCHES[0])
        under_test.assert_empty()
        assert_agrees(under_test.step(BATCHES[0]), plain, alpha)


@each_alpha
def test_reset_takes_memory_from_a_graph_that_is_still_held(alpha: float) -> None:
    model = build("llama")
    plain = loss_and_gradients(model, BATCHES[0])
    with planned(model, BATCHES[0], alpha) as under_test:
        abandoned = model(**BATCHES[0]).loss
        under_test.engine.reset()
        under_test.assert_empty()
        assert_agrees(under_test.step(BATCHES[0]), plain, alpha)
        with pytest.raises(RuntimeError, match=r"are gone: .*the step was abandoned"):
            abandoned.backward()
        assert_agrees(under_test.step(BATCHES[0]), plain, alpha)


# ---- forwards without gradients


@slow_pair
@each_family
@each_alpha
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_forward_without_gradients(family: str, alpha: float, context: Callable[[], object], padded: bool) -> None:
    model, batch = build(family), make_batch(2, TOKENS, padded)
    plain = loss_and_gradients(model, batch)

    def forward() -> Tensor:
        torch.manual_seed(5)
        with context():
            return model(**batch).logits.clone()

    logits = forward()
    with planned(model, batch, alpha) as under_test:
        assert torch.equal(forward(), logits)
        under_test.assert_empty()
        assert_agrees(under_test.step(batch), plain, alpha)
        assert torch.equal(forward(), logits)


@slow_pair
@each_family
@each_alpha
@pytest.mark.parametrize("use_cache", [False, True], ids=["without_cache", "with_cache"])
def test_generating_between_steps(family: str, alpha: float, use_cache: bool) -> None:
    model = build(family)
    plain = loss_and_gradients(model, BATCHES[0])
    prompt = BATCHES[1]["input_ids"][:, :7]

    def generate() -> Tensor:
        model.eval()
        tokens = model.generate(prompt, max_new_tokens=5, do_sample=False, use_cache=use_cache, pad_token_id=0)
        model.train()
        return tokens

    tokens = generate()
    with planned(model, BATCHES[0], alpha) as under_test:
        assert torch.equal(generate(), tokens)
        assert_agrees(under_test.step(BATCHES[0]), plain, alpha)
        assert torch.equal(generate(), tokens)


@each_alpha
def test_evaluation_mode_with_gradients(alpha: float) -> None:
    model = build("gpt2_dropout")
    training = loss_and_gradients(model, BATCHES[0])
    evaluating = loss_and_gradients(model.eval(), BATCHES[0])
    assert evaluating.distance(training) > 0.01
    with planned(model.train(), BATCHES[0], alpha) as under_test:
        model.eval()
        assert_agrees(under_test.step(BATCHES[0]), evaluating, alpha)
        model.train()
        assert_agrees(under_test.step(BATCHES[0]), training, alpha)


# ---- batches that differ from the planned one


@each_alpha
def test_larger_batch_is_profiled_anew(alpha: float) -> None:
    model, larger = build("llama"), make_batch(2, TOKENS + 16)
    plain = loss_and_gradients(model, larger)
    with planned(model, BATCHES[0], alpha) as under_test:
        assert under_test.engine.profile is None
        assert_equal(under_test.profile_step(larger), plain)
        under_test.assert_as_planned()
        assert under_test.profile is not None and under_test.profile.tokens == TOKENS + 16
        under_test.load(alpha)
        assert_agrees(under_test.step(larger), plain, alpha)
        under_test.assert_as_planned()


@pytest.fixture(scope="module")
def by_plan(family: str, alpha: float) -> Iterator[tuple[EngineUnderTest, Step]]:
    """A model that follows the plan for the first batch, and what plain training makes of that."""
    model = build(family)
    plain = loss_and_gradients(model, BATCHES[0])
    with planned(model, BATCHES[0], alpha) as under_test:
        yield under_test, plain


@slow_pair
@pytest.mark.parametrize("family", ["llama", "gpt2_dropout"], scope="module")
@pytest.mark.parametrize("alpha", ALPHAS, ids=lambda alpha: f"alpha{alpha:g}", scope="module")
@pytest.mark.parametrize(("batch", "tokens"), [(1, TOKENS), (2, TOKENS - 11), (2, 3), (1, 2), (1, 2 * TOKENS)])
def test_other_batches_run_by_the_same_plan(
    by_plan: tuple[EngineUnderTest, Step], family: str, alpha: float, batch: int, tokens: int
) -> None:
    (under_test, plain), other = by_plan, make_batch(batch, tokens)
    assert_agrees(under_test.step(other), loss_and_gradients(build(family), other), alpha)
    assert_agrees(under_test.step(BATCHES[0]), plain, alpha)
    assert under_test.engine.profile is None
    under_test.assert_as_planned()


@each_alpha
def test_padding_may_come_and_go(alpha: float) -> None:
    model, padded = build("llama"), make_batch(2, TOKENS, padded=True)
    plain, plain_padded = loss_and_gradients(model, BATCHES[0]), loss_and_gradients(model, padded)
    with planned(model, BATCHES[0], alpha) as under_test:
        assert_agrees(under_test.step(padded), plain_padded, alpha)
        assert_agrees(under_test.step(BATCHES[0]), plain, alpha)
        under_test.assert_as_planned()


@slow_if(lambda family, alpha: (family == "llama_gqa") != (alpha == 0.5))
@each_alpha
@pytest.mark.parametrize("family", ["llama_gqa", "mistral_window"])
def test_packed_documents_see_only_themselves(family: str, alpha: float) -> None:
    model, batch = build(family), make_batch(2, TOKENS)
    positions = [torch.cat([torch.arange(n), torch.arange(TOKENS - n)]) for n in (20, TOKENS - 7)]
    packed = batch | {"position_ids": torch.stack(positions)}
    plain, unpacked = loss_and_gradients(model, packed), loss_and_gradients(model, batch)
    assert not torch.allclose(plain.loss, unpacked.loss)
    with planned(model, batch, alpha) as under_test:
        # Documents are attended one by one, plain training masks the whole: sums are rounded in another order.
        assert_close(under_test.step(packed), plain)


def _left_padded() -> Batch:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, :9] = 0
    return make_batch(2, TOKENS) | {"attention_mask": mask}


def _row_without_tokens() -> Batch:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1] = 0
    return make_batch(2, TOKENS) | {"attention_mask": mask}


@each_alpha
@pytest.mark.parametrize(
    "batch",
    [pytest.param(_left_padded(), id="left_padded"), pytest.param(_row_without_tokens(), id="row_without_tokens")],
)
def test_tokens_that_see_nothing(alpha: float, batch: Batch) -> None:
    """Their labels count in the loss, although attention gives them zeros."""
    model, fitting = build("llama"), make_batch(2, TOKENS)
    plain = loss_and_gradients(model, batch)
    with planned(model, fitting, alpha) as under_test:
        assert_close(under_test.step(batch), plain)


# ---- models of which not everything is trained


def _frozen_embeddings(model: nn.Module) -> None:
    model.get_input_embeddings().requires_grad_(False)


def _frozen_first_layers(model: nn.Module) -> None:
    _frozen_embeddings(model)
    model.model.layers[:2].requires_grad_(False)


def _all_but_one_layer_frozen(model: nn.Module) -> None:
    model.requires_grad_(False)
    model.model.layers[1].requires_grad_(True)


def _all_but_embeddings_frozen(model: nn.Module) -> None:
    model.requires_grad_(False)
    model.get_input_embeddings().requires_grad_(True)


@slow_if(lambda padded: padded)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize(
    "freeze",
    [_frozen_embeddings, _frozen_first_layers, _all_but_one_layer_frozen, _all_but_embeddings_frozen],
    ids=lambda freeze: freeze.__name__.strip("_"),
)
def test_frozen_parts(freeze: Callable[[nn.Module], None], padded: bool) -> None:
    model = build("llama")
    freeze(model)
    assert_trains_like_plain(model, make_batch(2, TOKENS, padded))


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no_dropout", "dropout"])
@each_alpha
def test_lora(dropout: float, amp: bool, alpha: float) -> None:
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj", "down_proj"])
    model = peft.get_peft_model(build("llama"), adapters).train()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)  # zero at first: adapters would get no gradient worth comparing
    plain = loss_and_gradients(model, BATCHES[0], amp)
    assert all("lora" in name for name in plain.gradients)
    with EngineUnderTest(model) as under_test:
        assert_equal(under_test.profile_step(BATCHES[0], amp), plain)
        assert not under_test.engine.layer_classes.unsliceable
        under_test.load(alpha)
        actual = under_test.step(BATCHES[0], amp)
        under_test.assert_as_planned()
    if amp and alpha == 0.5:
        assert_close_in_bf16(actual, plain)
    else:
        assert_agrees(actual, plain, alpha)


@each_alpha
def test_lora_on_parameters(alpha: float) -> None:
    """PEFT registers a parametrization in each forward, which sets the weight to itself."""
    peft = pytest.importorskip("peft")
    adapters = peft.LoraConfig(
        r=4, target_modules=[], target_parameters=["mlp.up_proj.weight"], init_lora_weights=False
    )
    model = peft.get_peft_model(build("llama"), adapters).train()
    plain = loss_and_gradients(model, BATCHES[0])
    with EngineUnderTest(model) as under_test:
        assert_equal(under_test.profile_step(BATCHES[0]), plain)
        assert not under_test.engine.layer_classes.unsliceable
        under_test.load(alpha)
        assert_agrees(under_test.step(BATCHES[0]), plain, alpha)


def assert_close_in_bf16(actual: Step, plain: Step) -> None:
    """A rounding error of bf16 is at most 2**-9 of the value, and a few of them differ."""
    assert actual.distance(plain) <= 4 * 2**-9


def test_tied_embeddings() -> None:
    config = transformers.LlamaConfig(**build("llama").config.to_dict() | {"tie_word_embeddings": True})
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert_trains_like_plain(model, BATCHES[0])


@pytest.mark.parametrize("alpha", [0.0, 1.0], ids=lambda alpha: f"alpha{alpha:g}")
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_router_logits_in_the_loss(family: str, alpha: float) -> None:
    model = build(family)
    batch = BATCHES[0] | {"output_router_logits": True}
    plain, without = loss_and_gradients(model, batch), loss_and_gradients(model, BATCHES[0])
    assert plain.distance(without) > 1e-4
    with planned(model, batch, alpha) as under_test:
        assert_equal(under_test.profiled, plain)
        assert_equal(under_test.step(batch), plain)
        under_test.assert_as_planned()


@slow_if(lambda family, joint: joint and family != "mixtral_balanced")
@pytest.mark.parametrize("joint", [False, True], ids=["auto", "nest"])
@pytest.mark.parametrize("family", BALANCED)
def test_outputs_of_layers_in_slices_are_joined(family: str, joint: bool) -> None:
    torch.manual_seed(0)
    model, batch = BALANCED[family]().train(), make_batch(2, TOKENS, padded=True)
    asked = batch | {"output_hidden_states": True}
    plain, expected = loss_and_gradients(model, batch), model(**asked)
    with planned(model, batch, 0.5, joint_attention=joint) as under_test:
        assert_close(under_test.step(batch), plain)
        output = model(**asked)
        output.loss.backward()  # recomputes, and collects nothing
    for name in ("router_logits", "hidden_states"):
        torch.testing.assert_close(getattr(output, name), getattr(expected, name), rtol=1e-4, atol=1e-5)


def test_attention_weights_are_refused() -> None:
    model = build("llama")
    with planned(model, BATCHES[0], 0.5), pytest.raises(ValueError, match="set output_attentions=False"):
        model(**BATCHES[0], output_attentions=True)


# ---- layers of other kinds


class ConvBlock(PlainBlock):
    """A causal convolution over tokens before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2))


class MeanBlock(PlainBlock):
    """A mean over all tokens after attention: every token sees later ones."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x.mean(1, keepdim=True)


class MlpBlock(nn.Module):
    """A block without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


class HandwrittenAttentionBlock(MlpBlock):
    """Attention as two matrix products and a softmax, which cannot be intercepted."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.shape[-1]
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (x @ x.transpose(1, 2) / hidden**0.5).masked_fill(future, -torch.inf)
        return super().forward(x + scores.softmax(-1) @ x)


class NoisyBlock(PlainBlock):
    """Draws random numbers other than dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-6 * torch.randn_like(x)


class NoisyInputBlock(PlainBlock):
    """Draws random numbers before attention."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1e-6 * torch.randn_like(x))


class StochasticDepthBlock(PlainBlock):
    """Skips the layer for some of the sequences of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        keep = (torch.rand(x.shape[0], 1, 1) < 0.7).to(x.dtype)
        return x + keep * (super().forward(x) - x)


class KeywordModel(PlainModel):
    """Passes layers their input by name, and positions by which they read a table."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x, positions = self.embed(input_ids), torch.arange(input_ids.shape[1])
        for block in self.blocks:
            x = block(hidden=x, positions=positions, rows=positions[None].expand(len(input_ids), -1))
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


class PositionedBlock(PlainBlock):
    """Reads a table at given positions, `[tokens]` and `[batch, tokens]`."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2 * TOKENS, 32)

    def forward(self, hidden: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        return super().forward(hidden + self.table(positions) * self.table(rows))


class TokensFirstModel(PlainModel):
    """Layers that take `[tokens, batch, hidden]`."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x = self.embed(input_ids).transpose(0, 1)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x.transpose(0, 1))[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


class ExtrasBlock(PlainBlock):
    """Returns more than its hidden states."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        y = super().forward(x)
        return y, y.square().mean(-1), None


class ExtrasModel(PlainModel):
    """Adds what layers return apart from their hidden states to the loss."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x, extra = self.embed(input_ids), torch.zeros(())
        for block in self.blocks:
            x, squares, nothing = block(x)
            assert squares.shape == input_ids.shape and nothing is None
            extra = extra + squares.mean()
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return transformers.modeling_outputs.CausalLMOutput(loss=loss + 0.1 * extra)


class InPlaceActivationBlock(PlainBlock):
    """Overwrites an earlier result in place."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)
        self.mlp[1] = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout(0.1, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.norm1(x).sigmoid() * 2
        gate.mul_(3)
        return super().forward(x).add_(gate.exp() * gate)


def _layers(block: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [block() for _ in range(4)]


WHOLE_LAYERS = {
    ConvBlock: "aten.constant_pad_nd computes along the tokens",
    MeanBlock: "aten.mean computes along the tokens",
    HandwrittenAttentionBlock: "aten.arange makes a tensor by the number of tokens",
    NoisyBlock: "aten.randn_like draws random numbers for each token",
    NoisyInputBlock: "aten.randn_like draws random numbers for each token",
}


@pytest.mark.parametrize(("block", "why"), WHOLE_LAYERS.items(), ids=[block.__name__ for block in WHOLE_LAYERS])
def test_layers_that_cannot_be_cut_run_whole(block: type[nn.Module], why: str) -> None:
    found = assert_trains_like_plain(PlainModel(_layers(block)), BATCHES[0], exact_alphas=ALPHAS)
    assert found == f"{block.__name__} may not compute each token by itself outside attention: {why}"


def test_layers_without_attention() -> None:
    assert assert_trains_like_plain(PlainModel(_layers(MlpBlock)), BATCHES[0]) == ""


def test_random_numbers_for_whole_sequences_need_no_cut() -> None:
    assert assert_trains_like_plain(PlainModel(_layers(StochasticDepthBlock)), BATCHES[0]) == ""


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no_dropout", "dropout"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre_norm", "post_norm"])
def test_tokens_first(dropout: float, norm_first: bool) -> None:
    layers = _layers(lambda: nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, norm_first=norm_first))
    assert assert_trains_like_plain(TokensFirstModel(layers), BATCHES[0]) == ""


def test_input_by_keyword() -> None:
    assert assert_trains_like_plain(KeywordModel(_layers(PositionedBlock)), BATCHES[0]) == ""


def test_layers_that_return_more_than_hidden_states() -> None:
    assert assert_trains_like_plain(ExtrasModel(_layers(ExtrasBlock)), BATCHES[0]) == ""


def test_operations_in_place() -> None:
    assert assert_trains_like_plain(PlainModel(_layers(InPlaceActivationBlock)), BATCHES[0]) == ""


class OverwritingBlock(PlainBlock):
    """Writes its output over its input."""

    def forward(self, x: Tensor) -> Tensor:
        x += super().forward(x.clone())
        return x


def test_layer_that_overwrites_its_input() -> None:
    assert assert_trains_like_plain(PlainModel(_layers(OverwritingBlock)), BATCHES[0]) == ""


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_layer_that_overwrites_its_input_which_found_no_room(alpha: float) -> None:
    model = PlainModel(_layers(OverwritingBlock))
    plain = loss_and_gradients(model, BATCHES[0])
    with planned(model, BATCHES[0], alpha) as under_test:
        engine, swap = under_test.engine, under_test.engine.swap
        assert swap is not None
        engine.load(replace(swap, memory=replace(swap.memory, slot=0)), 2**30)
        assert_close(under_test.step(BATCHES[0]), plain)
        assert engine.memory is not None and engine.memory.stats.overflow_bytes > 0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"hidden": None}, "Returning returned dict with no tensor for an input of shape "),
        (
            SimpleNamespace(hidden=torch.ones(2, TOKENS, 32)),
            "Returning returned SimpleNamespace with no tensor for an ",
        ),
    ],
)
def test_layers_without_hidden_states_are_refused(returned: object, message: str) -> None:
    class Returning(PlainBlock):
        def forward(self, x: Tensor) -> object:
            return returned

    with EngineUnderTest(PlainModel(_layers(Returning))) as under_test, pytest.raises(ValueError, match=message):
        under_test.step(BATCHES[0])


@pytest.mark.parametrize("single", [make_batch(2, 1), make_batch(1, 1)], ids=["batch2", "batch1"])
def test_single_token_first(single: Batch) -> None:
    """Layers are cut after a first batch of one token, which does not show whether they can be."""
    model = build("llama")
    single = single | {"shift_labels": single["labels"]}
    plain_single, plain = loss_and_gradients(model, single), loss_and_gradients(model, BATCHES[0])
    with EngineUnderTest(model) as under_test:
        assert_equal(under_test.profile_step(single), plain_single)
        assert_equal(under_test.profile_step(BATCHES[0]), plain)
        assert under_test.engine.layer_classes.unsliceable == ""
        under_test.load(0.5)
        assert_close(under_test.step(BATCHES[0]), plain)


# ---- attach, detach, copies


@each_family
def test_detach_restores_the_model(family: str) -> None:
    model, batch = build(family), make_batch(2, TOKENS, padded=True)
    plain, implementation, sdpa = (
        loss_and_gradients(model, batch),
        model.config._attn_implementation,
        F.scaled_dot_product_attention,
    )
    names = [set(vars(module)) for module in model.modules()]
    with planned(model, batch, 0.5) as under_test:
        assert model.config._attn_implementation != implementation
        assert under_test.engine.host_bytes > 0
    assert model.config._attn_implementation == implementation
    assert F.scaled_dot_product_attention is sdpa
    assert [set(vars(module)) for module in model.modules()] == names
    assert under_test.engine.host_bytes == 0
    assert_equal(loss_and_gradients(model, batch), plain)


def test_detach_restores_a_forward_of_the_layer_itself() -> None:
    model = build("llama")
    layer = model.model.layers[0]
    own = layer.forward = lambda *args, **kwargs: type(layer).forward(layer, *args, **kwargs)
    with planned(model, BATCHES[0], 0.5):
        assert layer.forward is not own
    assert layer.forward is own


@pytest.mark.slow
def test_attaching_again() -> None:
    model = build("llama")
    plain = loss_and_gradients(model, BATCHES[0])
    for alpha in ALPHAS:
        with planned(model, BATCHES[0], alpha) as under_test:
            assert_agrees(under_test.step(BATCHES[0]), plain, alpha)


def _saved_and_loaded(model: nn.Module) -> nn.Module:
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    loaded: nn.Module = torch.load(saved, weights_only=False)
    return loaded


@each_family
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("copied", [lambda model: copy.deepcopy(copy.deepcopy(model)), _saved_and_loaded])
def test_copy_of_an_attached_model_runs_plainly(
    copied: Callable[[nn.Module], nn.Module], family: str, padded: bool
) -> None:
    model, batch = build(family), make_batch(2, TOKENS, padded)
    plain = loss_and_gradients(model, batch)
    with planned(model, batch, 0.5) as under_test:
        duplicate = copied(model)
        with torch.no_grad():
            next(model.parameters()).mul_(2.0)  # the copies have weights of their own
        loss = duplicate(**batch).loss
        under_test.assert_empty()
        del loss
        assert_equal(loss_and_gradients(duplicate, batch), plain)
    assert_equal(loss_and_gradients(duplicate, batch), plain)


def test_slots_of_a_plan_that_is_too_small() -> None:
    """A wrong plan costs memory on the device, and nothing else."""
    model = build("llama")
    plain = loss_and_gradients(model, BATCHES[0])
    with planned(model, BATCHES[0], 0.0) as under_test:
        engine, swap = under_test.engine, under_test.engine.swap
        assert swap is not None
        for share, calls in itertools.product((0, 0.3, 0.9), (1, 3, 4, 6)):
            small = alpha_swap(
                1.0, calls, int(swap.memory.slot * share), swap.storage.tokens, joint_attention=swap.joint_attention
            )
            engine.load(small, 2**30)
            assert_equal(under_test.step(BATCHES[0]), plain)
            assert engine.memory is not None and engine.memory.stats.overflow_bytes > 0
