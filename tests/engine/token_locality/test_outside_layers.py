"""`stream_from_host="model"`: models that relate tokens outside of layers are refused, and others trained as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import FAMILIES, VOCABULARY, make_batch
from support.harness import EngineUnderTest, assert_close, loss_and_gradients
from support.markers.slow import slow_if
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from transformers.models.llama.modeling_llama import LlamaMLP

BATCH = make_batch(2, 61)
PARTS = ("model.embed_tokens", "model.norm", "lm_head")


class Changed(nn.Module):
    """A module, and a function of its output."""

    def __init__(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.change = module, change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(self.module(x))


class CentredGradient(torch.autograd.Function):
    """Subtracts from the gradient of each token the mean over tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx - dx.mean(1, keepdim=True)


def with_gradient_hook(x: Tensor) -> Tensor:
    x.register_hook(lambda dx: dx - dx.mean(1, keepdim=True))
    return x


def build(part: str = "", change: Callable[[Tensor], Tensor] | None = None) -> nn.Module:
    """Return a model in which a function follows a part."""
    model = FAMILIES["llama"].build()
    if change is not None:
        model.set_submodule(part, Changed(model.get_submodule(part), change))
    return model


def step(model: nn.Module, batch: dict[str, Any] = BATCH) -> None:
    """Train plainly and slice by slice, and compare."""
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model, slice_tokens=16, stream_from_host="model") as under_test:
        assert_close(under_test.profile_step(batch), plain)
        under_test.load(0.5)
        assert_close(under_test.step(batch), plain)


@slow_if(lambda case_id: not case_id.endswith("model.norm"))
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda x: x + F.pad(x, (0, 0, 1, -1)), "{part} may not compute each token by itself: aten.constant_pad_nd"),
        (lambda x: x - x.mean(1, keepdim=True), "{part} may not compute each token by itself: aten.mean"),
        (lambda x: x * torch.linspace(0, 1, x.shape[1])[:, None], "{part} may not .*: aten.linspace makes a tensor by"),
        (lambda x: x + torch.rand_like(x), "{part} draws random numbers, which would be others for each slice"),
        (
            lambda x: x if x.mean() > 0 else -x,
            "{part} may not .*: a trial run .* ended with: aten",
        ),
        (lambda x: x / x.shape[1], "computes otherwise with more tokens: aten.div.Tensor is called with numbers"),
        (lambda x: x if x.shape[1] < 32 else -x, "computes otherwise with more tokens"),
        (CentredGradient.apply, "gets what an autograd function computed"),
        (with_gradient_hook, "registers hooks on tensors"),
    ],
)
def test_what_relates_tokens_is_refused(part: str, change: Callable[[Tensor], Tensor], why: str) -> None:
    with pytest.raises(ValueError, match='stream_from_host="model" runs the model slice after slice') as caught:
        step(build(part, change))
    caught.match(why.format(part=part))


@pytest.mark.parametrize(
    ("part", "module", "why"),
    [
        ("lm_head", lambda: spectral_norm(nn.Linear(32, VOCABULARY)), "_SpectralNorm changes a buffer"),
        ("model.embed_tokens", lambda: nn.Embedding(VOCABULARY, 32, scale_grad_by_freq=True), "scale_grad_by_freq"),
        ("model.embed_tokens", lambda: nn.Embedding(VOCABULARY, 32, max_norm=0.5), "max_norm"),
    ],
)
def test_modules_that_relate_tokens_are_refused(part: str, module: Callable[[], nn.Module], why: str) -> None:
    model = build()
    model.set_submodule(part, module())
    with pytest.raises(ValueError, match=why):
        step(model)


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_what_keeps_tokens_apart_is_trained(part: str) -> None:
    step(build(part, lambda x: F.gelu(x) + 0.5 * x.cumsum(-1) / x.shape[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_gqa", "gemma", "mixtral", "phi"])
def test_ordinary_models_are_trained(family: str) -> None:
    step(FAMILIES[family].build())


def test_code_of_the_model_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = build()
    run = type(model.model).forward

    def centred(self: Any, input_ids: Tensor, **kwargs: Any) -> Any:
        x = self.embed_tokens(input_ids)
        return run(self, **kwargs | {"inputs_embeds": x - x.mean(1, keepdim=True)})

    monkeypatch.setattr(type(model.model), "forward", centred)
    with pytest.raises(ValueError, match="but model may not compute each token by itself: "):
        step(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(name: str, register: str) -> None:
    model = build()
    with EngineUnderTest(model, slice_tokens=16, stream_from_host="model") as under_test:
        under_test.profile_step(BATCH)
        handle = getattr(model.get_parameter(name), register)(lambda p: None)
        with pytest.raises(ValueError, match=f"hooks on its parameter {name}, which would get the gradient of each"):
            under_test.step(BATCH)
        handle.remove()
        under_test.step(BATCH)


class DrawingMLP(LlamaMLP):
    """Drops its output for some of the sequences, or for some of the tokens."""

    each_token = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        return F.dropout(y) if self.each_token else y * (torch.rand(x.shape[0], 1, 1) < 0.5)


@pytest.mark.slow
def test_what_is_drawn_for_all_tokens_is_refused() -> None:
    model: Any = build()
    for layer in model.model.layers:
        layer.mlp.__class__ = DrawingMLP
    with (
        EngineUnderTest(model, slice_tokens=16, stream_from_host="model") as under_test,
        pytest.raises(ValueError, match=r"model\.layers\.0\.mlp draws random numbers for all tokens at once, "),
    ):
        under_test.step(BATCH)
    for layer in model.model.layers:
        layer.mlp.each_token = True
    with EngineUnderTest(model, slice_tokens=16, stream_from_host="model") as under_test:
        under_test.step(BATCH)


@pytest.mark.parametrize("part", [*PARTS, "model.layers.1"])
def test_hooks_of_a_user_are_refused(part: str) -> None:
    model = build()
    with EngineUnderTest(model, slice_tokens=16, stream_from_host="model") as under_test:
        under_test.profile_step(BATCH)
        seen: list[torch.Size] = []
        model.get_submodule(part).register_forward_hook(lambda module, x, y: seen.append(y.shape))
        with pytest.raises(ValueError, match=f"hooks on {part} would see the tokens of one slice only"):
            under_test.step(BATCH)
    assert not seen


@pytest.mark.slow
def test_a_proof_leaves_no_trace() -> None:
    model = build()
    before = [dict(vars(module)) for module in model.modules()]
    with EngineUnderTest(model, slice_tokens=16, stream_from_host="model") as under_test:
        under_test.profile_step(BATCH)
    assert [dict(vars(module)).keys() for module in model.modules()] == [held.keys() for held in before]


# ---- arguments of the call

RESTARTING = (torch.arange(61) % 13).expand(2, -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        {"use_cache": False},
        {"use_cache": True, "attention_mask": torch.ones(2, 61, dtype=torch.long)},
        {"use_cache": False, "attention_mask": torch.ones(2, 61, dtype=torch.long)},
    ],
)
def test_documents_are_kept_apart_as_in_plain_training(others: dict[str, Any]) -> None:
    step(build(), BATCH | {"position_ids": RESTARTING} | others)


def padded(*, labels: bool) -> dict[str, Tensor]:
    """Return a batch with padding on the right, which has labels or has none."""
    mask = torch.ones(2, 61, dtype=torch.long)
    mask[0, 50:] = 0
    given = BATCH["labels"] if labels else BATCH["labels"].masked_fill(mask == 0, -100)
    return BATCH | {"attention_mask": mask, "labels": given}


@pytest.mark.slow
def test_padding_without_labels_is_trained() -> None:
    batch = padded(labels=False)
    step(build(), batch)
    batch["labels"][0, 50] = 5  # the last token before the padding learns it
    step(build(), batch)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (BATCH | {"position_ids": RESTARTING, "use_cache": True}, r"set model\.config\.use_cache = False, or "),
        (padded(labels=True), "padding has labels"),
        (BATCH | {"attention_mask": torch.ones(2, 1, 61, 61).tril().bool()}, r"got attention_mask \[2, 1, 61, 61\]"),
        (BATCH | {"ignore_index": 5}, "is called with ignore_index=5, but .* ignores labels of -100"),
        (BATCH | {"return_dict": False}, "is called with return_dict=False, .*: set return_dict=True"),
        (BATCH | {"output_hidden_states": True}, "is called with output_hidden_states=True, .* returns the loss only"),
    ],
)
def test_what_a_slice_would_compute_otherwise_is_refused(batch: dict[str, Any], message: str) -> None:
    model = build()
    with EngineUnderTest(model, slice_tokens=16, stream_from_host="model") as under_test:
        with pytest.raises(ValueError, match=message):
            model(**batch)
        under_test.assert_empty()


def test_weights_that_are_computed_are_refused() -> None:
    model = build()
    with EngineUnderTest(model, slice_tokens=16, stream_from_host="model"):
        weights = {name: p * 1.1 for name, p in model.named_parameters()}
        with pytest.raises(ValueError, match=r"weights that are computed from others \(functional_call\)"):
            torch.func.functional_call(model, weights, (), BATCH)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("use_cache", True, "makes a key-value cache"),
        ("return_dict", False, "return_dict=False"),
        ("output_hidden_states", True, "output_hidden_states=True"),
    ],
)
def test_what_the_configuration_asks_for_is_refused(setting: str, value: bool, message: str) -> None:
    model: Any = build()
    setattr(model.config, setting, value)
    under_test = EngineUnderTest(model, slice_tokens=16, stream_from_host="model")
    with under_test, pytest.raises(ValueError, match=message):
        model(**BATCH | {"position_ids": RESTARTING})
