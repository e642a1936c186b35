"""Hooks of saved tensors that surround the layers, or that cannot be set, as in plain training or with a warning."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.families import FAMILIES, PlainBlock, PlainModel, make_batch
from support.harness import EngineUnderTest, Step, assert_close, assert_equal, gradients_of, loss_and_gradients
from support.markers.slow import slow_if
from support.samples.messages import assert_one_line
from support.trainer_harness import LanguageModel, fit
from torch import Tensor, nn
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)
from torch.func import functional_call, grad

from lightning_memo import MemoLoop, MemoStrategy

BATCH = make_batch(2, 48)
PLAINLY = (
    "PlainBlock runs as in plain training, because saved_tensors_hooks are set around it, and would miss what is "
    "swapped or recomputed"
)


def build() -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES["block_dropout"].build().train()


class Inside(PlainBlock):
    """Sets hooks in its own forward."""

    def forward(self, x: Tensor) -> Tensor:
        with save_on_cpu():
            return super().forward(x)


def step(model: nn.Module, around: Callable[[], Any]) -> Step:
    model.zero_grad()
    torch.manual_seed(5)
    with around():
        loss = model(**BATCH).loss
    loss.backward()
    return Step(loss.detach().clone(), gradients_of(model))


class Counting:
    """Changes saved tensors by noise, and counts them."""

    def __init__(self) -> None:
        self.packed = self.unpacked = 0

    def __call__(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, t: Tensor) -> Tensor:
        self.packed += 1
        return t + torch.randn_like(t) if t.is_floating_point() else t

    def _unpack(self, t: Tensor) -> Tensor:
        self.unpacked += 1
        return t


@slow_if(lambda alpha: alpha == 1.0)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_hooks_of_users_get_all_that_plain_training_saves(alpha: float) -> None:
    model = build()
    plain = step(model, expected := Counting())
    with EngineUnderTest(model) as under_test, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        under_test.profile_step(BATCH)
        under_test.load(alpha)
        for _ in range(2):
            assert_equal(step(model, found := Counting()), plain)
            assert (found.packed, found.unpacked) == (expected.packed, expected.unpacked)
            under_test.assert_empty()
        (assert_close if alpha == 0.5 else assert_equal)(step(model, nullcontext), step_plainly())
    assert [str(w.message) for w in caught if "hooks" in str(w.message)] == [f"lightning_memo: {PLAINLY}."]


def step_plainly() -> Step:
    return step(build(), nullcontext)


def scaled() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: t, lambda t: t * 1.1 if t.is_floating_point() else t)


def rounded() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda t: (t.bfloat16(), t.dtype), lambda packed: packed[0].to(packed[1]))


def whole_step(model: nn.Module, ids: Tensor, around: Callable[[], Any]) -> None:
    with around():
        model(input_ids=ids, labels=ids).loss.backward()


def forward(model: nn.Module, ids: Tensor, around: Callable[[], Any]) -> None:
    with around():
        logits = model(input_ids=ids).logits
    logits[:, 1:].logsumexp(-1).square().mean().backward()


def loss(model: nn.Module, ids: Tensor, around: Callable[[], Any]) -> None:
    logits = model(input_ids=ids).logits[:, :-1] * 2
    with around():
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()


def backward(model: nn.Module, ids: Tensor, around: Callable[[], Any]) -> None:
    logits = model(input_ids=ids).logits
    loss = logits.logsumexp(-1).mean() - logits.gather(-1, ids[..., None]).mean()
    with around():
        loss.backward()


def decoder(model: nn.Module, ids: Tensor, around: Callable[[], Any]) -> None:
    with around():
        hidden = model.base_model(input_ids=ids).last_hidden_state
    model.lm_head(hidden).log_softmax(-1).gather(-1, ids[..., None]).mean().backward()


def one_layer(model: nn.Module, ids: Tensor, around: Callable[[], Any]) -> None:
    layer = model.base_model.layers[1]
    with contextlib.ExitStack() as stack:
        handles = [
            layer.register_forward_pre_hook(lambda *_: stack.enter_context(around()) and None),
            layer.register_forward_hook(lambda *_: stack.close()),
        ]
        loss = model(input_ids=ids, labels=ids).loss
        for handle in handles:
            handle.remove()
    loss.backward()


IN_SLICES = {"alpha": 0.5, "slice_tokens": 8, "stream_from_host": "hidden", "loss_chunk_tokens": 4}


PLANS = {"plain": {"loss_chunk_tokens": 4}, "recomputed": {"alpha": 0.0}, "slices": IN_SLICES}
AROUND = [
    *(
        (part, hooks)
        for part in (whole_step, forward, loss, backward, decoder, one_layer)
        for hooks in (scaled, rounded)
    ),
    *((part, allow_mutation_on_saved_tensors) for part in (whole_step, backward)),
    *((part, save_on_cpu) for part in (whole_step, loss, one_layer)),
]


@slow_if(
    lambda plan, part, around: (
        plan == "recomputed" or around in (rounded, save_on_cpu) or part not in (whole_step, one_layer)
    )
)
@pytest.mark.filterwarnings("ignore:lightning_memo. ")
@pytest.mark.parametrize(("part", "around"), AROUND)
@pytest.mark.parametrize("plan", PLANS)
def test_hooks_around_parts_of_a_step(plan: str, part: Callable[..., None], around: Callable[[], Any]) -> None:
    # Values that differ in their last bit may be rounded to two neighbours. In fp64, none of them is near the middle.
    dtype = torch.float64 if around is rounded else torch.float32
    plain, mine = (FAMILIES["llama"].build().train().to(dtype) for _ in range(2))
    mine.load_state_dict(plain.state_dict())
    ids = make_batch(2, 24)["input_ids"]
    with MemoLoop(mine, torch.optim.SGD(mine.parameters(), lr=0.0), **PLANS[plan]):
        for hooks in (nullcontext, around, nullcontext):
            for model in (plain, mine):
                model.zero_grad()
                part(model, ids, hooks)
            torch.testing.assert_close(gradients_of(mine), gradients_of(plain), rtol=1e-4, atol=1e-6)


def test_hooks_get_the_tensors_of_the_attention_of_the_model() -> None:
    """Masks of padding are saved in plain training, and kernels of lightning_memo need none."""
    model = FAMILIES["llama"].build().train()
    batch = make_batch(2, 24) | {"attention_mask": torch.ones(2, 24, dtype=torch.long)}
    batch["attention_mask"][1, :9] = 0
    found: list[list[torch.Size]] = []

    def run() -> None:
        saved: list[torch.Size] = []
        with saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
            model(**batch)
        found.append(saved)

    run()
    with EngineUnderTest(model), pytest.warns(UserWarning, match="as in plain training"):
        run()
    assert found[0] == found[1]


class Hooked(LanguageModel):
    def __init__(self, around: Callable[[], Any]) -> None:
        super().__init__("llama")
        self._around = around

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with self._around():
            return super().loss(batch)


@pytest.mark.parametrize(
    ("around", "why"),
    [(scaled, "saved_tensors_hooks"), (lambda: disable_saved_tensors_hooks("none here"), "none here")],
)
def test_layers_in_slices_cannot_run_plainly(around: Callable[[], Any], why: str) -> None:
    with pytest.raises(ValueError, match="one slice of the tokens after the other") as caught:
        fit(MemoStrategy(alpha=0.5, slice_tokens=8, stream_from_host="model"), Hooked(around))
    assert_one_line(caught.value, why, 'stream_from_host="hidden"')


@pytest.mark.filterwarnings("ignore:lightning_memo. save_on_cpu around PlainBlock gets nothing")
def test_tensors_on_the_host() -> None:
    for model, around in ((build(), save_on_cpu), (PlainModel([Inside() for _ in range(3)]), nullcontext)):
        plain = step(model, around)
        with EngineUnderTest(model) as under_test:
            under_test.profile_step(BATCH)
            for alpha in (0.0, 1.0):
                under_test.load(alpha)
                assert_equal(step(model, around), plain)
                assert not under_test.engine.ran_plainly
                under_test.assert_empty()


def test_layers_run_plainly_where_no_hooks_can_be_set() -> None:
    model = build()
    plain = loss_and_gradients(model, BATCH)
    with EngineUnderTest(model) as under_test:
        under_test.profile_step(BATCH)
        under_test.load(0.0)
        with pytest.warns(UserWarning, match="PlainBlock runs as in plain training, .* are off: none here"):
            assert_equal(step(model, lambda: disable_saved_tensors_hooks("none here")), plain)
        assert_equal(step(model, nullcontext), plain)
        under_test.assert_empty()


def test_a_transform_around_the_model() -> None:
    model = PlainModel([PlainBlock() for _ in range(2)])
    plain = loss_and_gradients(model, BATCH)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with MemoLoop(model, torch.optim.SGD(model.parameters(), lr=0.1), alpha=0.0):
        with pytest.warns(UserWarning, match="PlainBlock runs as in plain training"):
            gradients = grad(lambda given: functional_call(model, given, (), BATCH).loss)(weights)
        assert_equal(Step(plain.loss, gradients), plain)
