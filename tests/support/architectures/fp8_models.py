"""Models of modules of the TransformerEngine that is loaded, or of its stand-in, and what is compared of training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from typing_extensions import override

from lightning_memo import MemoStrategy
from support.families import PlainBlock, PlainModel
from support.parallel_training import whole
from support.samples.callbacks import Gradients
from support.trainer_harness import LanguageModel, fit, loader, plain

LAYERS, HIDDEN, HEADS = 4, 32, 4


def engine() -> Any:
    """Return `transformer_engine.pytorch`."""
    return sys.modules["transformer_engine.pytorch"]


def manager() -> Any:
    """Return `FP8GlobalStateManager`."""
    return sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager


def recipes() -> Any:
    """Return the module of the recipes."""
    return sys.modules["transformer_engine.common.recipe"]


class EngineBlock(nn.Module):
    """A block of the three modules that compute in FP8."""

    def __init__(self, **mlp: Any) -> None:
        super().__init__()
        te = engine()
        self.qkv, self.out = te.LayerNormLinear(HIDDEN, 3 * HIDDEN), te.Linear(HIDDEN, HIDDEN)
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **mlp)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, HEADS, hidden // HEADS)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.mlp(x)


class GatedBlock(PlainBlock):
    """A block that calls its module of TransformerEngine in FP8 only, which no attribute tells."""

    def __init__(self) -> None:
        super().__init__()
        self.more = engine().Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.more(x) if manager().is_fp8_enabled() else x


def blocks_of(kind: Callable[[], nn.Module] = EngineBlock, layers: int = LAYERS) -> nn.Module:
    """Return a model of several blocks."""
    return PlainModel([kind() for _ in range(layers)])


def recipe_of(name: str) -> Any:
    """Return a recipe by its name: "delayed", "most_recent", "unfused", "current", "mxfp8", "mxfp8_2d" or "blocks"."""
    if name == "current":
        return recipes().Float8CurrentScaling()
    if name == "mxfp8":
        return recipes().MXFP8BlockScaling()
    if name == "mxfp8_2d":
        return recipes().MXFP8BlockScaling(enable_2d_quantization=True)
    if name == "blocks":
        return recipes().Float8BlockScaling()
    algorithms: dict[str, Any] = {"delayed": "max", "most_recent": "most_recent", "unfused": lambda h: h.amax(0)}
    return recipes().DelayedScaling(amax_history_len=4, amax_compute_algo=algorithms[name])


class InFp8(LanguageModel):
    """A module whose training step enters the autocast around the model."""

    def __init__(self, recipe: Any, build: Callable[[], nn.Module] = blocks_of, **settings: Any) -> None:
        super().__init__(build, **settings)
        self.recipe = recipe

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with engine().autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return super().loss(batch)


class FromThirdStep(InFp8):
    """A module that computes in FP8 from the third step on."""

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return LanguageModel.loss(self, batch) if self.global_step < 2 else super().loss(batch)


class Scales(Callback):
    """Notes the scales and histories of all modules after each batch."""

    def __init__(self) -> None:
        self.noted: list[list[Tensor]] = []

    @override
    def on_train_batch_end(self, trainer: Any, module: nn.Module, *args: Any) -> None:
        self.noted.append(list(scales_in(module)))


def scales_in(module: nn.Module) -> Iterator[Tensor]:
    """Yield copies of the scales and histories of a module."""
    for m in module.modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            state = getattr(m, "fp8_meta", {}).get(key)
            for name in ("scale", "amax_history"):
                if (t := getattr(state, name, None)) is not None:
                    yield t.clone()


def trained(strategy: Any, module: LanguageModel, data: Any = None, **settings: Any) -> tuple[Any, list[Tensor]]:
    """Train, and return the result, and all that has to be bit-equal: losses, gradients, weights, scales, histories."""
    manager().reset()
    gradients, scales = Gradients(), Scales()
    train: Callable[..., Any] = plain if strategy is None else lambda *a, **k: fit(strategy, *a, **k)
    callbacks = [gradients, scales, *settings.pop("callbacks", ())]
    result = train(module, loader() if data is None else data, callbacks=callbacks, **settings)
    weights = [whole(p) for p in module.parameters()]
    noted = [t for step in scales.noted for t in step]
    compared = [torch.tensor(result.losses), *gradients.last.values(), *weights, *noted]
    return result, [whole(t).cpu() for t in compared]  # some strategies leave the weights on the device


def strategy(**settings: Any) -> MemoStrategy:
    """Return a strategy that recomputes all layers, unless `settings` say otherwise."""
    return MemoStrategy(**{"alpha": 0.0} | settings)


def line_of(module: LanguageModel, max_steps: int = 3, **settings: Any) -> str:
    """Return the one line with which training is refused."""
    with pytest.raises(ValueError, match=r"\w") as caught:
        fit(strategy(**settings), module, max_steps=max_steps)
    assert "\n" not in str(caught.value)
    return str(caught.value)
