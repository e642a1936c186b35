"""Layers that count, draw, switch and convert: gradients are those of plain training, or one line refuses the layer."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention.recorded_training import Recording, blocks, compare
from support.families import PlainBlock, PlainModel, make_batch
from support.harness import Batch
from support.markers.slow import slow_if
from support.trainer_harness import batches, fit
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

WHOLE: list[dict[str, Any]] = [{"alpha": 0.0}, {"alpha": 0.5}, {"alpha": 1.0}]
CUT: list[dict[str, Any]] = [*WHOLE, {"alpha": 0.5, "slice_tokens": 8, "stream_from_host": "hidden"}]


class Conjugated(PlainBlock):
    """Saves a lazily conjugated view of a tensor that it saves as well."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        z = torch.view_as_complex(self.norm2(x).sin().unflatten(-1, (16, 2)).contiguous())
        return x + torch.view_as_real((z * z.conj() * z).cos()).flatten(-2)


class Negated(PlainBlock):
    """Saves a lazily negated view."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        z = torch.view_as_complex(self.norm2(x).sin().unflatten(-1, (16, 2)).contiguous())
        a, b = z.imag, z.conj().imag
        return x + torch.cat([a * b, b * b * a], -1)


class Quantized(PlainBlock):
    """Computes with a copy of a weight that it rounds in place (a straight-through estimator)."""

    traced = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = super().forward(x), self.weight.to(torch.bfloat16)
        if self.traced:
            with torch.no_grad():
                weight.copy_((self.weight * 4).round() / 4)
        else:
            weight.data.copy_((self.weight * 4).round() / 4)
        return x + (x.to(torch.bfloat16) @ weight).float()


class Counting(PlainBlock):
    """Opens a gate after some forwards, which a list and a number count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.past = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.past.append(self.calls)
        x = super().forward(x)
        return x * 2 if self.calls > 3 and len(self.past) > 3 else x


class CountingAside(PlainBlock):
    """Opens a gate after some forwards, which an object and an attribute of a parameter count."""

    def __init__(self) -> None:
        super().__init__()
        self.state, self.weight = SimpleNamespace(calls=0, past=[]), nn.Parameter(torch.ones(32))
        self.weight.calls = 0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        self.state.calls += 1
        self.state.past.append(self.state.calls)
        self.weight.calls += 1  # type: ignore[attr-defined]
        x = super().forward(x) * self.weight
        return x * 2 if min(self.state.calls, self.weight.calls, len(self.state.past)) > 3 else x


class Catching(PlainBlock):
    """Catches all exceptions of its operations."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x)
        except Exception:
            return x


class Switched(PlainBlock):
    """Mixes tokens, and notes a mean in a buffer, as soon as a callback says so."""

    on = False

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.on:
            self.mean = self.mean * 0.5 + 0.5 * y.detach().abs().amax((0, 1))
            y = y + 0.5 * F.pad(y, (0, 0, 1, 0))[:, :-1]
        return y / self.mean.clone()


class SwitchedByNumber(PlainBlock):
    """Mixes tokens as soon as a number says so."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + 0.5 * F.pad(y, (0, 0, 1, 0))[:, :-1] if self.steps >= 2 else y


class Normalized(PlainBlock):
    """A norm over the batch, which a callback switches to training."""

    def __init__(self) -> None:
        super().__init__()
        self.norm3 = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.norm3(x.flatten(0, 1)).view_as(x)


class Switching(Recording):
    """Switches the blocks from the third step on."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for block in self.model.blocks:
            if isinstance(block, Switched):
                block.on = batch_idx >= 2
            elif isinstance(block, Normalized):
                block.norm3.train(batch_idx >= 2)
            elif isinstance(block, SwitchedByNumber):
                block.steps = batch_idx


class Aside(PlainBlock):
    """Returns scores besides the hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        return x, self.scores(x)


class LastScores(PlainModel):
    """Its loss uses scores only, of the last block or, if the blocks are detached, of each."""

    def __init__(self, detached: bool) -> None:
        super().__init__([Aside() for _ in range(3)])
        self.detached = detached

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x, loss = self.embed(input_ids), torch.zeros(())
        for block in self.blocks:
            x, scores = block(x.detach() if self.detached else x)
            loss = loss + scores.square().mean() if self.detached else scores.square().mean()
        return CausalLMOutput(loss=loss)


def check(build: Callable[[], nn.Module], settings: dict[str, Any], steps: int = 5) -> None:
    compare(build, settings, Switching, steps)


@slow_if(lambda settings: settings != {"alpha": 0.5})
@pytest.mark.parametrize("settings", WHOLE)
@pytest.mark.parametrize("kind", [Conjugated, Negated, Counting, CountingAside, Catching, Switched, Normalized])
def test_layers_that_run_whole(kind: type[nn.Module], settings: dict[str, Any]) -> None:
    check(blocks(kind), settings)


class Untraced(Quantized):
    """Rounds it in a way that PyTorch does not see."""

    traced = False


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("kind", [Quantized, Untraced])
def test_copies_of_weights_that_are_rounded(kind: type[nn.Module], alpha: float) -> None:
    """At other alphas the layer is cut, and sums over two slices round differently in bfloat16."""
    check(blocks(kind), {"alpha": alpha})


@pytest.mark.slow
@pytest.mark.parametrize("settings", [s for s in CUT if s not in WHOLE])
def test_layers_that_catch_exceptions_are_cut(settings: dict[str, Any]) -> None:
    check(blocks(Catching), settings)


@pytest.mark.parametrize("kind", [Switched, SwitchedByNumber, Normalized])
def test_layers_that_begin_to_mix_tokens(kind: type[nn.Module]) -> None:
    with pytest.warns(UserWarning, match=f"lightning_memo: {kind.__name__} .*. It runs as one slice now."):
        check(blocks(kind), {"alpha": 0.5, "check_slices": False})


@slow_if(lambda detached, settings: settings != {"alpha": 0.5} and not detached)
@pytest.mark.parametrize("settings", CUT)
@pytest.mark.parametrize("detached", [False, True])
def test_losses_that_do_not_use_the_output_of_a_layer(detached: bool, settings: dict[str, Any]) -> None:
    check(lambda: LastScores(detached), settings, steps=3)


class DropConnect(PlainBlock):
    """Drops weights, whose sizes may be those of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x) @ F.dropout(self.weight, 0.2)


class HeadDropout(PlainBlock):
    """Drops parts of tensors `[batch, heads, tokens, features]`, of which there may be as many heads as tokens."""

    def forward(self, x: Tensor) -> Tensor:
        parts = super().forward(x).unflatten(-1, (8, 4)).transpose(1, 2)
        return F.dropout(parts, 0.2).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("kind", "tokens"), [(DropConnect, 64), (HeadDropout, 16)])
def test_dropout_of_something_else_than_tokens(kind: type[nn.Module], tokens: int) -> None:
    with pytest.warns(UserWarning, match="dropout gets a tensor that does not hold the tokens"):
        fit_one(blocks(kind), {"alpha": 0.5}, make_batch(1, tokens))


class Writing(nn.Module):
    """Model of layers that get a tensor, and write into it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(96, 32), nn.Linear(32, 96)
        self.blocks = nn.ModuleList(Spending() for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x, spent = self.embed(input_ids), torch.zeros(1)
        for block in self.blocks:
            x = block(x, spent)
        return CausalLMOutput(loss=self.head(x).square().mean())


class Spending(PlainBlock):
    def forward(self, x: Tensor, spent: Tensor) -> Tensor:  # type: ignore[override]
        spent += 1
        return super().forward(x)


class Leaky(PlainBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.rrelu(x, training=True)


def fit_one(build: Callable[[], nn.Module], settings: dict[str, Any], batch: Batch) -> None:
    fit(MemoStrategy(**settings), Recording(build), batches([batch]), max_steps=1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (Writing, "Spending writes into a tensor that it gets as an argument"),
        (blocks(Leaky), "calls rrelu, which fills a tensor after autograd has saved it"),
    ],
)
def test_what_cannot_be_repeated_is_refused(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        fit_one(build, {"alpha": 0.0}, make_batch(2, 24))
    assert "\n" not in str(caught.value)
