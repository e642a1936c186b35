"""Arguments `[batch, heads, tokens, head_dim]`: values of the first layer, shared keys, rotary tables, masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.attention.recorded_training import BOUND, compare
from support.families import VOCABULARY, PlainBlock, PlainModel
from support.markers.slow import slow_if
from support.parallel_training import Run, train_alone, train_together
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutput

from lightning_memo.engine.forward.cut_tokens import token_dim_of

pytestmark = pytest.mark.usefixtures("own_folder")

ALL_ON_HOST: dict[str, Any] = {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "hidden"}
SETTINGS: list[dict[str, Any]] = [*({"alpha": alpha} for alpha in (0.0, 0.5, 1.0)), ALL_ON_HOST]
CUT = pytest.mark.filterwarnings("error:.*as one slice")


def qkv_of(block: PlainBlock, x: Tensor) -> tuple[Tensor, ...]:
    """Return queries, keys and values, `[batch, heads, tokens, head_dim]`."""
    qkv: Tensor = block.qkv(block.norm1(x))
    return qkv.unflatten(-1, (3, block.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def finish(block: PlainBlock, x: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the output of a block whose attention gets these queries, keys and values."""
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
    x = x + block.out(y.transpose(1, 2).flatten(2))
    return x + block.mlp(block.norm2(x))


def turned(t: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = t.chunk(2, -1)
    return t * cos + torch.cat((-b, a), -1) * sin


def tables(tokens: int, dim: int = 8) -> tuple[Tensor, Tensor]:
    """Return rotary tables `[1, 1, tokens, dim]`."""
    angles = torch.arange(tokens)[:, None] * torch.logspace(0, -2, dim // 2)
    angles = torch.cat((angles, angles), -1)[None, None]
    return angles.cos(), angles.sin()


class Mixing(PlainBlock):
    """Mixes its values with those of the first block."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.linspace(0.1, 0.8, 8))

    def forward(self, x: Tensor, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = qkv_of(self, x)
        if first is not None:
            v = torch.lerp(v, first, self.gate)
        return finish(self, x, q, k, v), v


class Keyless(PlainBlock):
    """Attends to keys and values of the first block."""

    def forward(self, x: Tensor, first: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = qkv_of(self, x)
        k, v = first or (k, v)
        return finish(self, x, q, k, v), (k, v)


class Passing(PlainModel):
    """Passes what the first block returns beside its hidden states to the others."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x, first = self.blocks[0](self.embed(input_ids))
        for block in self.blocks[1:]:
            x, _ = block(x, first)
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


class Given(PlainModel):
    """Gives further arguments to all blocks."""

    def __init__(self, kind: Callable[[], nn.Module], arguments: Callable[[int, int], tuple[Tensor, ...]]) -> None:
        super().__init__([kind() for _ in range(3)])
        self.arguments = arguments

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x, arguments = self.embed(input_ids), self.arguments(*input_ids.shape)
        for block in self.blocks:
            x = block(x, *arguments)
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


class Rotating(PlainBlock):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = qkv_of(self, x)
        return finish(self, x, turned(q, cos, sin), turned(k, cos, sin), v)


class Masked(PlainBlock):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return finish(self, x, *qkv_of(self, x), mask)


def causal(batch: int, tokens: int) -> Tensor:
    """Return a causal mask `[batch, 1, tokens, tokens]` with some distance of its own for each sequence."""
    far = (torch.arange(tokens)[:, None] - torch.arange(tokens)).float()
    scores = -far * torch.linspace(0.01, 0.1, batch)[:, None, None]
    return scores.masked_fill(far < 0, -torch.inf)[:, None]


CASES: dict[str, Callable[[], nn.Module]] = {
    "values": lambda: Passing([Mixing() for _ in range(3)]),
    "keys": lambda: Passing([Keyless() for _ in range(3)]),
    "tables": lambda: Given(Rotating, lambda batch, tokens: tables(tokens)),
}


@slow_if(lambda case, settings: settings != {"alpha": 0.5} and (case != "values" or settings not in SETTINGS))
@pytest.mark.parametrize("settings", [*SETTINGS, {**ALL_ON_HOST, "alpha": 0.0}, {**ALL_ON_HOST, "alpha": 1.0}], ids=str)
@pytest.mark.parametrize("case", CASES)
@CUT
def test_gradients_are_those_of_plain_training(case: str, settings: dict[str, Any]) -> None:
    compare(CASES[case], settings)


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("heads", [1, 4])
@CUT
def test_masks_are_not_cut(heads: int, alpha: float) -> None:
    compare(
        lambda: Given(Masked, lambda batch, tokens: (causal(batch, tokens).expand(-1, heads, -1, -1),)),
        {"alpha": alpha},
    )


@slow_if(lambda case, tokens: tokens == 8 and case != "keys")
@pytest.mark.parametrize("tokens", [4, 8], ids=["as many as heads", "as many as entries of a head"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*layers run as one slice")
def test_lengths_that_are_other_sizes(case: str, tokens: int) -> None:
    compare(CASES[case], {"alpha": 0.5}, tokens=tokens)


@pytest.fixture
def _double() -> Iterator[None]:
    """Let models be double: with two tokens, some gradients are zero, and in single precision nothing but rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@slow_if(lambda case, tokens: tokens == 2 and case != "masks")
@pytest.mark.usefixtures("_double")
@pytest.mark.parametrize("tokens", [2, 4], ids=["as many as sequences", "as many as heads"])
@pytest.mark.parametrize("case", [*CASES, "masks"])
@pytest.mark.filterwarnings("ignore:.*layers run as one slice")
def test_sizes_that_coincide(case: str, tokens: int) -> None:
    """How an argument is cut may be wrong then, which the proof notices: it runs with other numbers of tokens."""

    def masks(batch: int, tokens: int) -> tuple[Tensor, ...]:
        return (causal(batch, tokens).expand(-1, 4, -1, -1),)

    compare(CASES.get(case, lambda: Given(Masked, masks)), {"alpha": 0.5}, tokens=tokens)


class TokensFirst(nn.Module):
    """Takes `[tokens, batch, hidden]`, and weights `[batch, heads, tokens, head_dim]`."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.scale = nn.MultiheadAttention(32, 4), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        y = self.attention(x, x, x, need_weights=False)[0]
        return x + y * (weights * self.scale).permute(2, 0, 1, 3).flatten(2)


class Turned(nn.Module):
    """Turns tokens to the front for a model of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.ModuleList(TokensFirst() for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x = self.embed(input_ids)
        weights, x = x.sin().unflatten(-1, (4, 8)).transpose(1, 2), x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, weights)
        logits = self.head(x.transpose(0, 1))
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@CUT
def test_layers_with_tokens_first(alpha: float) -> None:
    compare(Turned, {"alpha": alpha})


class Both(Mixing):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = qkv_of(self, x)
        if first is not None:
            v = torch.lerp(v, first, self.gate)
        return finish(self, x, turned(q, cos, sin), turned(k, cos, sin), v), v


class LlamaParts(transformers.LlamaModel):
    """The parts of Llama around other layers."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> BaseModelOutputWithPast:
        x, first = self.embed_tokens(input_ids), None
        if position_ids is None:
            position_ids = torch.arange(x.shape[1])[None]
        cos, sin = (table[:, None] for table in self.rotary_emb(x, position_ids))
        for layer in self.layers:
            x, v = layer(x, cos, sin, first)
            first = v if first is None else first
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x))


def llama(num_hidden_layers: int = 3) -> nn.Module:
    """Return Llama with rotary tables `[1, 1, tokens, dim]` and the values of its first layer in all layers."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=num_hidden_layers,
        num_attention_heads=4,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model.model.__class__ = LlamaParts
    model.model.layers = nn.ModuleList(Both() for _ in range(num_hidden_layers))
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [*SETTINGS, *({"alpha": a, "slice_tokens": 16, "stream_from_host": "model"} for a in (0.0, 0.5, 1.0))],
    ids=str,
)
@CUT
def test_slice_after_slice_through_the_model(settings: dict[str, Any]) -> None:
    compare(llama, settings, tokens=45)


@pytest.mark.slow
@pytest.mark.parametrize("slices", [{}, {"slice_tokens": 8, "stream_from_host": "hidden"}], ids=["alpha", "host"])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_processes_that_share_tokens(method: str, slices: dict[str, Any]) -> None:
    run = Run(family=llama, tokens=45, steps=2)
    settings = {"context_parallel_size": 2, "ulysses_size": {"ring": 1, "ulysses": 2}[method], "alpha": 0.5, **slices}
    errors = train_together(2, run, settings).worst_error(train_alone(run))
    assert all(error <= BOUND for error in errors.values()), errors


@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((2, 4, 48, 8), 2),
        ((1, 1, 48, 8), 2),
        ((1, 1, 96, 8), 2),
        ((2, 4, 48, 1), 2),
        ((2, 48, 4, 8), 1),
        ((2, 48, 48, 8), 1),
        ((2, 1, 48, 48), None),
        ((1, 4, 48, 96), None),
        ((1, 4, 96, 48), None),
        ((2, 4, 1, 48), None),
        ((3, 4, 48, 8), None),
        ((2, 4, 8, 48), None),
        ((2, 4, 48), None),
        ((2, 4, 48, 8, 2), None),
    ],
)
def test_where_arguments_hold_tokens(shape: tuple[int, ...], dim: int | None) -> None:
    assert token_dim_of(torch.empty(shape), 48, 2, 1, shards=2) == dim
    if dim == 2:
        assert token_dim_of(torch.empty(shape), 48, 2, 0, shards=2) == dim
