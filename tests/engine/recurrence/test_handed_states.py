"""Layers with recurrences and convolutions run in slices, which hand their states on."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from support.alpha_plans import SWAPPED
from support.architectures.hybrids import HYBRIDS, make_hybrid
from support.harness import Batch, EngineUnderTest, Step, gradients_of, loss_and_gradients
from support.markers.slow import slow_if
from torch import nn

from lightning_memo.artifacts.costs import Place
from lightning_memo.engine.recurrence import handing
from lightning_memo.planner.token_slices import KEPT, RECOMPUTED, TokenRange

TOKENS = 70
# Of each gradient, relative to its norm: slices only sum in another order, and cut chunks in other places.
BOUND = 1e-5
KEEP, SWAP, RECOMPUTE = KEPT, SWAPPED, RECOMPUTED
Places = tuple[tuple[str, Place], ...]
FEW = ("Qwen3NextConfig", "BambaConfig", "Lfm2Config")
few_kinds = slow_if(lambda config: config not in FEW)


def make_batch(tokens: int = TOKENS, rows: int = 2) -> Batch:
    ids = torch.randint(1, 96, (rows, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


@functools.cache
def reference(config: str, tokens: int = TOKENS) -> Step:
    return loss_and_gradients(make_hybrid(config), make_batch(tokens))


def assert_like(actual: Step, plain: Step) -> None:
    assert actual.gradients.keys() == plain.gradients.keys()
    torch.testing.assert_close(actual.loss, plain.loss, rtol=1e-6, atol=0)
    least = 1e-6 * plain.norm()
    wrong = {
        name: error
        for name, error in actual.distances(plain).items()
        if error > BOUND and error * float(plain.gradients[name].norm()) > BOUND * least
    }
    assert not wrong


def cut(*parts: tuple[int, Places]) -> tuple[TokenRange, ...]:
    starts = (0, *(stop for stop, _ in parts))
    return tuple(TokenRange(start, stop, action) for start, (stop, action) in zip(starts, parts, strict=False))


@slow_if(lambda case_id: case_id != "Lfm2Config")
@few_kinds
@pytest.mark.parametrize("config", HYBRIDS)
def test_gradients_at_every_alpha_and_in_any_mix_of_slices(config: str) -> None:
    batch, plain = make_batch(), reference(config)
    with EngineUnderTest(make_hybrid(config)) as under_test:
        assert_like(under_test.profile_step(batch), plain)
        assert not under_test.engine.layer_classes.unsliceable
        for alpha, slice_tokens in ((0.0, None), (0.5, None), (1.0, None), (0.0, 7), (0.5, 33), (1.0, 16)):
            under_test.load(alpha, slice_tokens)
            assert_like(under_test.step(batch), plain)
        for script in (
            cut((1, SWAP), (3, RECOMPUTE), (4, RECOMPUTE), (40, SWAP), (TOKENS, RECOMPUTE)),
            cut((30, RECOMPUTE), (31, SWAP), (45, KEEP), (69, RECOMPUTE), (TOKENS, SWAP)),
        ):
            under_test.load(0.5, script=script)
            assert_like(under_test.step(batch), plain)


@pytest.mark.slow
@pytest.mark.parametrize("stream_from_host", ["attention", "hidden", "model"])
@pytest.mark.parametrize("config", HYBRIDS)
def test_host_backed_slices(config: str, stream_from_host: Any) -> None:
    batch, plain, slices = make_batch(), reference(config), {"slice_tokens": 16, "stream_from_host": stream_from_host}
    with EngineUnderTest(make_hybrid(config), **slices) as under_test:
        assert_like(under_test.profile_step(batch), plain)
        for alpha in (0.0, 0.5, 1.0):
            under_test.load(alpha)
            assert_like(under_test.step(batch), plain)


def test_a_later_layer_whose_attention_needs_all_tokens_is_refused_slice_by_slice() -> None:
    """The first layer has no attention."""
    model = make_hybrid("Qwen3NextConfig", attention_dropout=0.1)
    refused = pytest.raises(
        ValueError, match=r'^stream_from_host="model" runs .* draws dropout: set stream_from_host="none"$'
    )
    with EngineUnderTest(model, slice_tokens=16, stream_from_host="model") as under_test, refused:
        under_test.profile_step(make_batch())


@pytest.mark.slow
@pytest.mark.parametrize("config", ["Qwen3NextConfig", "FalconH1Config"])
def test_sequences_of_many_chunks(config: str) -> None:
    batch, plain = make_batch(600, rows=1), loss_and_gradients(make_hybrid(config), make_batch(600, rows=1))
    script = cut((100, SWAP), (228, RECOMPUTE), (356, RECOMPUTE), (500, SWAP), (600, RECOMPUTE))
    with EngineUnderTest(make_hybrid(config)) as under_test:
        under_test.profile_step(batch)
        under_test.load(0.5, script=script)
        assert_like(under_test.step(batch), plain)
        under_test.load(0.5, slice_tokens=128)
        assert_like(under_test.step(batch), plain)


@pytest.mark.slow
@pytest.mark.parametrize("config", ["Qwen3NextConfig", "BambaConfig", "Lfm2Config"])
def test_padding_on_both_sides(config: str) -> None:
    batch = make_batch()
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[0, :20], mask[1, 50:] = 0, 0
    batch |= {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}
    plain = loss_and_gradients(make_hybrid(config), batch)
    with EngineUnderTest(make_hybrid(config), slice_tokens=16) as under_test:
        under_test.profile_step(batch)
        assert not under_test.engine.layer_classes.unsliceable
        under_test.load(0.5)
        assert_like(under_test.step(batch), plain)


def without_input_gradients(model: nn.Module) -> None:
    """The first layer's input has no gradient, but its recurrence has weights that are trained."""
    model.get_input_embeddings().requires_grad_(False)
    for name, p in model.named_parameters():
        p.requires_grad_("A_log" in name or "dt_bias" in name or "o_proj" in name)


def without_recurrences(model: nn.Module) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_("self_attn" in name)


@pytest.mark.slow
@pytest.mark.parametrize("freeze", [without_input_gradients, without_recurrences])
@pytest.mark.parametrize("config", ["Qwen3NextConfig", "BambaConfig"])
def test_frozen_weights(config: str, freeze: Callable[[nn.Module], None]) -> None:
    model, batch = make_hybrid(config), make_batch()
    freeze(model)
    plain = loss_and_gradients(copy.deepcopy(model), batch)
    with EngineUnderTest(model, slice_tokens=16) as under_test:
        assert_like(under_test.profile_step(batch), plain)
        under_test.load(0.5)
        assert_like(under_test.step(batch), plain)


@pytest.mark.slow
@torch.no_grad()
def test_evaluation_in_slices() -> None:
    model, batch = make_hybrid("BambaConfig"), make_batch()
    plain = model(**batch).loss
    with torch.enable_grad(), EngineUnderTest(model, slice_tokens=16, stream_from_host="hidden") as under_test:
        under_test.profile_step(batch)
        under_test.load(0.5)
        with torch.no_grad():
            loss = model(**batch).loss
        assert gradients_of(model)
    torch.testing.assert_close(loss, plain, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("stream_from_host", "profiled"), [("none", None), ("attention", 64)])
def test_slots_have_room_for_states(stream_from_host: Any, profiled: int | None) -> None:
    batch = make_batch(256)
    with EngineUnderTest(
        make_hybrid("BambaConfig"), slice_tokens=profiled, stream_from_host=stream_from_host
    ) as under_test:
        under_test.profile_step(batch)
        for alpha in (0.0, 0.5, 1.0):
            under_test.load(alpha, 64)
            under_test.step(batch)
            under_test.assert_as_planned()


@pytest.mark.parametrize("config", ["BambaConfig", "FalconH1Config"])
def test_attention_that_needs_all_tokens_beside_a_recurrence(config: str) -> None:
    batch = make_batch()
    with EngineUnderTest(make_hybrid(config, attention_dropout=0.1)) as under_test:
        plain = loss_and_gradients(under_test.model, batch)
        classes = under_test.engine.layer_classes
        if config == "FalconH1Config":  # one layer has both
            assert "hands a state from token to token, and attention needs all tokens at once" in classes.unsliceable
        else:
            assert not classes.unsliceable
        assert plain.gradients.keys()


def test_kernels_that_join_functions_run_whole_layers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch, plain = make_hybrid("BambaConfig"), make_batch(), reference("BambaConfig")
    home, lengths = sys.modules[type(model.model.layers[0].mamba).__module__], []

    def joined(zxbcdt: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        lengths.append(zxbcdt.shape[1])

    monkeypatch.setattr(home, "mamba2_split_conv1d_scan_combined", joined)
    with EngineUnderTest(model) as under_test:
        under_test.profile_step(batch)
        under_test.load(0.5)
        lengths.clear()
        assert_like(under_test.step(batch), plain)
        assert not lengths
        under_test.load(1.0)
        under_test.step(batch)
        assert set(lengths) == {TOKENS}
    assert home.mamba2_split_conv1d_scan_combined is joined


def test_documents_of_a_row_are_not_handed_states() -> None:
    layer, reasons = make_hybrid("Lfm2Config").model.layers[0].conv, []
    x, kernel = torch.randn(1, 32, 8), torch.randn(32, 3)
    home = sys.modules[type(layer).__module__]
    with handing(layer, pytest.fail, reasons.append), pytest.raises(ValueError, match="can't keep packed sequences"):
        home.causal_conv1d_fn(x, kernel, seq_idx=torch.zeros(1, 8, dtype=torch.int32))
    assert reasons == ["causal_conv1d_fn keeps documents of a row apart (seq_idx)"]


@pytest.mark.slow
def test_recurrences_without_a_state_argument_run_whole() -> None:
    config = transformers.JambaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_d_state=4, mamba_dt_rank=4,
    )  # fmt: skip
    model, batch = transformers.AutoModelForCausalLM.from_config(config).train(), make_batch()
    plain = loss_and_gradients(copy.deepcopy(model), batch)
    with EngineUnderTest(model) as under_test:
        under_test.profile_step(batch)
        assert "may not compute each token by itself outside attention" in under_test.engine.layer_classes.unsliceable
        under_test.load(0.5)
        assert_like(under_test.step(batch), plain)
