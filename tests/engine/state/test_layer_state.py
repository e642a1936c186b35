"""Layers that change their own state in each forward: buffers are replayed, other state is refused."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import ClassVar

import pytest
import torch
from support.families import PlainBlock, PlainModel
from support.markers.slow import slow_if
from support.trainer_harness import LanguageModel, fit, loader, plain
from torch import Tensor, nn

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")


class Delayed(nn.Module):
    """A block whose output depends on a scale of earlier forwards, like FP8's delayed scaling."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("history", torch.ones(3))
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.history.amax().clone()
        self.history.copy_(torch.cat([x.detach().abs().amax()[None], self.history[:-1]]))
        self.forwards += 1
        return self.block(x) + (x / scale * 16).tanh() * scale


class Replaced(Delayed):
    """The same, with a new tensor in place of the buffer."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.history.amax()
        self.history = torch.cat([x.detach().abs().amax()[None], self.history[:-1]])
        return self.block(x) + (x / scale * 16).tanh() * scale


class Normalised(nn.Module):
    """A block with a norm over the batch and its running statistics."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.norm = block, nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.norm(x.flatten(0, 1)).view_as(x))


class Related(nn.Module):
    """A block with a sparse buffer."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("adjacency", torch.eye(32).roll(1, 0).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + (self.adjacency @ x.flatten(0, 1).T).T.view_as(x)


def module(kind: Callable[[nn.Module], nn.Module]) -> LanguageModel:
    return LanguageModel(lambda: PlainModel([kind(PlainBlock(dropout=0.1)) for _ in range(3)]))


class Counting(nn.Module):
    """Depends on the number of its forwards, which is no buffer."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.forwards = block, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return self.block(x) * (1 + 0.1 * self.forwards)


class Noisy(nn.Module):
    """A block with a random generator of its own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.chance = block, torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + torch.empty_like(x).normal_(generator=self.chance)


@slow_if(lambda kind, alpha: alpha != 0.5 and kind is not Counting)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", [Delayed, Replaced, Normalised, Counting, Noisy])
def test_buffers_are_those_of_plain_training(kind: type[nn.Module], alpha: float) -> None:
    """Probing, profiling and recomputing layers leave no trace, and a recomputation sees the buffers of the forward.

    With two micro-batches a step, with validation in between.
    """
    settings = {"max_steps": 2, "accumulate_grad_batches": 2, "val_check_interval": 2, "limit_val_batches": 1}
    strategy = MemoStrategy(alpha=alpha)
    told = pytest.warns(UserWarning, match="layers run as one slice.*, because") if alpha == 0.5 else nullcontext()
    with told:
        result = fit(strategy, module(kind), loader(), loader(), **settings)
    expected = plain(module(kind), loader(), val_data=loader(), **settings)
    assert result.losses == expected.losses
    for (name, a), b in zip(result.module.state_dict().items(), expected.module.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_sparse_buffers(alpha: float) -> None:
    """They have neither bytes nor a storage of their own, and stay on the device."""
    result, expected = fit(MemoStrategy(alpha=alpha), module(Related)), plain(module(Related))
    assert result.losses == pytest.approx(expected.losses, rel=1e-6)


def test_slices_would_change_buffers_more_than_once() -> None:
    with pytest.raises(ValueError, match='changes its buffer history in each forward: set stream_from_host="none"'):
        fit(MemoStrategy(slice_tokens=8, stream_from_host="attention"), module(TokenwiseState))


class TokenwiseState(Delayed):
    """A layer that does not mix tokens, but counts its calls."""

    def forward(self, x: Tensor) -> Tensor:
        scale = self.history.amax().clone()
        self.history += 1
        return self.block(x) + x / scale


class CountingOutside(Counting):
    """Counts where nobody can count back."""

    total: ClassVar[Iterator[int]] = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) * (1 + 0.1 * next(self.total))


def test_what_cannot_be_replayed_is_refused() -> None:
    with pytest.raises(ValueError, match="CountingOutside gives another output for the same input") as caught:
        fit(MemoStrategy(alpha=0.0), module(CountingOutside))
    assert "\n" not in str(caught.value)


def test_nan_is_no_hidden_state() -> None:
    """A model that has diverged trains on with losses of NaN, as in plain training."""

    def build() -> nn.Module:
        model = PlainModel([PlainBlock() for _ in range(3)])
        model.blocks[0].out.bias.data[3] = float("nan")
        return model

    assert all(loss != loss for loss in fit(MemoStrategy(alpha=0.5), LanguageModel(build), max_steps=2).losses)


def test_fp8_of_unknown_releases_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of TransformerEngine keep scales outside of buffers. A plain module replaces one here."""
    state = types.SimpleNamespace(is_fp8_enabled=lambda: True, is_fp8_calibration=lambda: False)
    manager = types.SimpleNamespace(FP8GlobalStateManager=state)
    linear = type("Linear", (nn.Linear,), {"__module__": "transformer_engine.pytorch.module.linear"})
    for where in ("quantization", "fp8"):
        with monkeypatch.context() as patch:
            patch.setitem(__import__("sys").modules, f"transformer_engine.pytorch.{where}", manager)

            def build() -> nn.Module:
                blocks = [PlainBlock() for _ in range(3)]
                for block in blocks:
                    block.out.__class__ = linear
                return PlainModel(blocks)

            state.is_fp8_enabled = lambda: True
            with pytest.raises(ValueError, match=r"releases .* are known, and one without a version is installed"):
                fit(MemoStrategy(alpha=0.0), LanguageModel(build))
            state.is_fp8_enabled = lambda: False
            assert len(fit(MemoStrategy(alpha=0.5), LanguageModel(build), max_steps=1).losses) == 1
