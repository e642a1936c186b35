"""Layer calls that store nothing in the forward, and run again in the backward."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import FAMILIES, make_batch
from support.harness import DELAYS, EngineUnderTest, assert_equal, gradients_of, loss_and_gradients
from support.markers.slow import slow_if
from support.samples.streamed import build, frozen_below
from support.trainer_harness import LanguageModel, fit, plain, shorten_measurements
from torch import nn
from transformers.models.llama import modeling_llama

from lightning_memo import MemoStrategy

TOKENS, SLICE = 61, 8
NAMES = ["llama_gqa", "block_dropout", "llama_lora", "mixtral", "mistral_window"]


def llama(layers: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES["llama_gqa"].build(num_hidden_layers=layers).train()


def in_segments(model: nn.Module, **settings: Any) -> EngineUnderTest:
    return EngineUnderTest(model, slice_tokens=SLICE, stream_from_host="hidden", **settings)


@slow_if(lambda family, segment_calls: family != "llama_gqa" or segment_calls != 2)
@pytest.mark.parametrize("segment_calls", [1, 2, 3])
@pytest.mark.parametrize("family", NAMES)
def test_gradients_are_those_of_layers_that_run_once(family: str, segment_calls: int) -> None:
    model, batch = build(family), make_batch(2, TOKENS)
    with in_segments(model) as under_test:
        under_test.profile_step(batch)
        under_test.load(0.0)
        once = under_test.step(batch)
        under_test.load(0.0, segment_calls=segment_calls)
        for _ in range(2):
            assert_equal(under_test.step(batch), once)
            under_test.assert_as_planned()
            memory = under_test.engine.memory
            assert memory is not None and memory.stats.peak_host_bytes <= memory.host_bytes


@pytest.mark.parametrize("segment_calls", [1, 3])
def test_gradients_under_autocast(segment_calls: int) -> None:
    """On a GPU, the backward runs in a thread of its own, and copies beside it."""
    model, batch = build("llama_gqa"), make_batch(2, TOKENS)
    with in_segments(model) as under_test:
        under_test.profile_step(batch, amp=True)
        under_test.load(0.0)
        once = under_test.step(batch, amp=True)
        under_test.load(0.0, segment_calls=segment_calls)
        for _ in range(2):
            assert_equal(under_test.step(batch, amp=True), once)
            under_test.assert_as_planned()


def test_host_memory_that_segments_need() -> None:
    """Each layer of the model stores as much; the first segment's input is computed from the token ids."""
    model, batch = llama(6), make_batch(2, TOKENS)
    peaks = {}
    with in_segments(model) as under_test:
        under_test.profile_step(batch)
        for segment_calls in (None, 3, 2):
            under_test.load(0.0, segment_calls=segment_calls)
            under_test.step(batch)
            memory = under_test.engine.memory
            assert memory is not None
            peaks[segment_calls] = memory.stats.peak_host_bytes
            assert 0.8 * memory.host_bytes <= peaks[segment_calls] <= memory.host_bytes
    assert peaks[2] < peaks[3] < peaks[None]


def test_each_call_but_those_of_the_last_segment_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = llama(5), make_batch(1, TOKENS)
    calls: list[nn.Module] = []
    forward = modeling_llama.LlamaMLP.forward

    def note(mlp: nn.Module, x: torch.Tensor) -> torch.Tensor:
        calls.append(mlp)
        return forward(mlp, x)

    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", note)
    with in_segments(model, check_slices=False) as under_test:
        under_test.profile_step(batch)
        under_test.load(0.0)
        under_test.step(batch)
        calls.clear()
        under_test.step(batch)
        once = [calls.count(layer.mlp) for layer in model.model.layers]
        under_test.load(0.0, segment_calls=2)
        calls.clear()
        under_test.step(batch)
    slices = -(-TOKENS // SLICE)
    again = [calls.count(layer.mlp) - count for layer, count in zip(model.model.layers, once, strict=True)]
    assert again == [slices, slices, slices, 0, 0]


def test_frozen_layers() -> None:
    model, batch = frozen_below(build("llama_gqa")), make_batch(2, TOKENS)
    with in_segments(model) as under_test:
        under_test.profile_step(batch)
        under_test.load(0.0)
        once = under_test.step(batch)
        under_test.load(0.0, segment_calls=1)
        assert_equal(under_test.step(batch), once)


def test_hidden_states_that_the_model_uses_elsewhere() -> None:
    """The output of a layer within a segment gets a gradient from elsewhere, too."""
    model, batch = llama(4), make_batch(2, TOKENS)

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        output = model(**batch, output_hidden_states=True)
        (output.loss + sum(states.square().mean() for states in output.hidden_states[1:3])).backward()
        return gradients_of(model)

    plain = gradients()
    with in_segments(model) as under_test:
        under_test.profile_step(batch)
        under_test.load(0.0, segment_calls=2)
        ours = gradients()
        assert not under_test.engine.calls
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-6 * plain[name].abs().max().item())


def test_a_kept_graph_and_gradients_of_some_weights() -> None:
    model, batch = llama(4), make_batch(2, TOKENS)
    plain = loss_and_gradients(model, batch)
    some = [model.model.layers[number].mlp.up_proj.weight for number in (1, 3)]
    with in_segments(model) as under_test:
        under_test.profile_step(batch)
        under_test.load(0.0, segment_calls=2)
        loss = model(**batch).loss
        late = torch.autograd.grad(loss, some[1:], retain_graph=True)
        model.zero_grad()
        loss.backward(retain_graph=True)
        first = gradients_of(model)
        model.zero_grad()
        loss.backward()
        second = gradients_of(model)
        with pytest.raises(RuntimeError, match="a second time"):
            loss.backward()
        del loss
        gc.collect()
        under_test.assert_empty()
    names = {id(p): name for name, p in model.named_parameters()}
    torch.testing.assert_close(late[0], plain.gradients[names[id(some[1])]], rtol=1e-5, atol=1e-7)
    for name, gradient in first.items():
        assert torch.equal(gradient, second[name])
        torch.testing.assert_close(gradient, plain.gradients[name], rtol=1e-4, atol=1e-6)


def test_a_graph_that_is_dropped_gives_its_memory_back() -> None:
    model, batch = llama(4), make_batch(2, TOKENS)
    with in_segments(model) as under_test:
        under_test.profile_step(batch)
        under_test.load(0.0, segment_calls=1)
        gc.collect()
        gc.disable()
        try:
            loss = model(**batch).loss
            assert under_test.engine.slots_in_use
            del loss
            under_test.assert_empty()
        finally:
            gc.enable()


def test_outputs_through_which_other_gradients_may_go_are_refused() -> None:
    model, batch = build("mixtral"), make_batch(2, TOKENS)
    with in_segments(model) as under_test:
        under_test.profile_step(batch)
        under_test.load(0.0, segment_calls=1)
        with pytest.raises(ValueError, match="has other outputs than hidden states, through which gradients may go"):
            model(**batch, output_router_logits=True)


def test_trains_as_plain_where_the_host_is_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the first step on, which is profiled."""
    monkeypatch.chdir(tmp_path)
    shorten_measurements(monkeypatch)
    settings = {"slice_tokens": 7, "stream_from_host": "hidden", "test_mode": DELAYS}
    ample = fit(MemoStrategy(alpha=0, **settings), LanguageModel(llama))
    needed = ample.plan.swap.host_bytes
    result = fit(MemoStrategy(host_memory=int(0.7 * needed), **settings), LanguageModel(llama))
    swap = result.plan.swap
    assert swap.host_bytes <= 0.7 * needed and 0 < swap.storage.calls_again < 6
    assert "run again in the backward, attention included" in result.plan.reason
    assert result.losses == ample.losses
    reference = plain(LanguageModel(llama))
    assert max(abs(a - b) for a, b in zip(result.losses, reference.losses, strict=True)) <= 3e-6
