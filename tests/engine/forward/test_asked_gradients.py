"""Layers that ask whether gradients are computed, and do something else then, do the same as in plain training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention.recorded_training import compare
from support.families import FAMILIES, PlainBlock, PlainModel
from support.markers.slow import slow_if
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

pytestmark = pytest.mark.usefixtures("own_folder")

SETTINGS: list[dict[str, Any]] = [
    *({"alpha": alpha} for alpha in (0.0, 0.5, 1.0)),
    {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "hidden"},
]
WHOLE = pytest.mark.filterwarnings("ignore:.*layers run as one slice")


def asking(ask: Callable[[Tensor], bool]) -> Callable[[], nn.Module]:
    class Asking(PlainBlock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x if ask(x) else x)

    return Asking


QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "requires_grad": lambda x: x.requires_grad,
    "is_leaf": lambda x: x.is_leaf,
    "grad_fn": lambda x: x.grad_fn is None,
    "is_grad_enabled": lambda x: torch.is_grad_enabled(),
}


class Begun(PlainModel):
    """The model lets the first hidden states require grad."""

    def __init__(self, blocks: Any) -> None:
        super().__init__(blocks)
        self.embed.register_forward_hook(lambda module, args, x: x.detach().requires_grad_())


def frozen(model: PlainModel) -> PlainModel:
    """The input of the first layer requires no grad."""
    model.embed.requires_grad_(False)
    return model


@slow_if(lambda settings, question: settings != {"alpha": 0.5} and question != "requires_grad")
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("question", QUESTIONS)
def test_inputs_without_gradients(question: str, settings: dict[str, Any]) -> None:
    """The first layer goes another way than the others, as the embedding is frozen."""
    kind = asking(QUESTIONS[question])
    compare(lambda: frozen(PlainModel([kind() for _ in range(3)])), settings)


def test_inputs_that_begin_the_graph() -> None:
    kind = asking(QUESTIONS["requires_grad"])
    compare(lambda: Begun([kind() for _ in range(3)]), {"alpha": 0.5})


@pytest.mark.parametrize("question", ["is_leaf", "grad_fn"])
def test_questions_that_have_another_answer_are_refused(question: str) -> None:
    kind = asking(QUESTIONS[question])
    with pytest.raises(ValueError, match="Asking asks is_leaf or grad_fn of its input, which is a leaf") as caught:
        compare(lambda: Begun([kind() for _ in range(3)]), {"alpha": 0.5})
    assert "\n" not in str(caught.value)


class AskingLlamaLayer(LlamaDecoderLayer):
    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(2 * x if x.requires_grad else x, *args, **kwargs)
        return out


def asking_llama() -> nn.Module:
    model = FAMILIES["llama"].build()
    for layer in model.model.layers:
        layer.__class__ = AskingLlamaLayer
    model.get_input_embeddings().requires_grad_(False)
    return model


@pytest.mark.slow
def test_slice_after_slice_through_the_model() -> None:
    compare(asking_llama, {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "model"})


class FrozenAttention(PlainBlock):
    """Only the feed-forward part is trained, so that attention of the first layer has no backward."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.norm1, self.qkv, self.out):
            part.requires_grad_(False)


class FullAttention(PlainBlock):
    """Attention that is not causal, so that slices are nested."""

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x if x.requires_grad else x
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


@slow_if(lambda kind, settings: kind is FrozenAttention and settings["alpha"] != 0.5)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((FrozenAttention, settings) for settings in SETTINGS),
        *((FullAttention, {"alpha": n}) for n in (0.0, 0.5, 1.0)),
    ],
    ids=str,
)
def test_first_layers_whose_attention_needs_no_gradient(kind: type[nn.Module], settings: dict[str, Any]) -> None:
    compare(lambda: frozen(PlainModel([kind() for _ in range(3)])), settings)


class Trained(PlainBlock):
    """Counts the forwards with gradients in a buffer, and attends once more then."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.more = more

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.more:
            heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        elif torch.is_grad_enabled():
            self.count += 1
        return super().forward(x * (1 + 0.1 * self.count))


@WHOLE
@pytest.mark.parametrize("more", [False, True])
def test_what_layers_do_only_with_gradients_is_known_before_they_are_cut(more: bool) -> None:
    compare(lambda: PlainModel([Trained(more) for _ in range(3)]), {"alpha": 0.5, "check_slices": False})
