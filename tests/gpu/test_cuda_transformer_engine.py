"""TransformerEngine's FP8 with its kernels: training is that without the strategy, bit by bit.

On the emulated device, for which it has no kernels, its stand-in takes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.precision import transformer_engine as fabric
from lightning.pytorch.plugins import TransformerEnginePrecision
from lightning.pytorch.strategies import ModelParallelStrategy
from support.architectures.fp8_models import InFp8, engine, recipe_of, strategy, trained
from support.devices import emulated_device
from support.families import PlainModel
from support.markers.slow import slow_if
from support.trainer_harness import LanguageModel, loader
from support.transformer_engine_stand_in import find_in, stand_in
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from typing_extensions import override

from lightning_memo import MemoStrategy

pytestmark = [pytest.mark.usefixtures("own_folder")]

LAYERS, HIDDEN, TOKENS, STEPS = 3, 256, 256, 3
# What tells whether the device computes by a recipe.
AVAILABLE = {
    "delayed": "is_fp8_available",
    "current": "is_fp8_available",
    "blocks": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}


@pytest.fixture(autouse=True)
def te(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """`transformer_engine.pytorch`."""
    if emulated_device is None:
        pytest.importorskip("transformer_engine")
        yield pytest.importorskip("transformer_engine.pytorch")
        return
    monkeypatch.setattr(fabric, "_TRANSFORMER_ENGINE_AVAILABLE", fabric._TRANSFORMER_ENGINE_AVAILABLE)  # set back
    find_in(tmp_path / "site")
    with stand_in() as package:
        yield package


class _Block(nn.Module):
    """A block of the three modules that compute in FP8. It has no attention, whose kernel might be another one."""

    def __init__(self, normed: bool = False) -> None:
        super().__init__()
        te = engine()
        self.norm = te.RMSNorm(HIDDEN) if normed else nn.Identity()
        self.qkv, self.out = te.LayerNormLinear(HIDDEN, 3 * HIDDEN), te.Linear(HIDDEN, HIDDEN)
        self.mlp = te.LayerNormMLP(HIDDEN, 2 * HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(q * torch.sigmoid(k) + v)
        y: Tensor = x + self.mlp(x)
        return y


class _PlainBlock(nn.Module):
    """A block of PyTorch's modules, in whose places Lightning's plugin puts TransformerEngine's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


def _compare(
    recipe: str,
    module: Callable[[], LanguageModel],
    memo: dict[str, Any],
    plugin: Callable[[], Any] | None = None,
    precision: str = "bf16-true",
    other: Any = None,
) -> Any:
    """Train with the strategy and with another one, by default Lightning's, and return the result of the first."""
    available, why = getattr(engine(), AVAILABLE[recipe])(return_reason=True)
    if not available:
        pytest.skip(why)

    def train(by: Any) -> tuple[Any, list[Tensor]]:
        how: dict[str, Any] = {"precision": precision} if plugin is None else {"plugins": [plugin()]}
        how["use_distributed_sampler"] = False  # with which Lightning shuffles, also for a single process
        return trained(by, module(), loader(2 * STEPS, TOKENS), accelerator="gpu", max_steps=STEPS, **how)

    _, expected = train(other)
    result, found = train(strategy(attention="sdpa", **memo))
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return result


def _module(recipe: str, **block: Any) -> Callable[[], LanguageModel]:
    return lambda: InFp8(recipe_of(recipe), lambda: PlainModel([_Block(**block) for _ in range(LAYERS)], hidden=HIDDEN))


@slow_if(lambda recipe, alpha: recipe != "delayed" and alpha != 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blocks", "mxfp8"])
def test_layers_train_bit_by_bit_as_plainly(recipe: str, alpha: float) -> None:
    """Losses, gradients, weights, scales and histories."""
    result = _compare(recipe, _module(recipe), {"alpha": alpha})
    assert not result.plan.swap.plain and result.plan.swap.alpha == round(alpha * LAYERS) / LAYERS


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_norms_beside_them_with_weights_in_fp32(alpha: float) -> None:
    _compare("delayed", _module("delayed", normed=True), {"alpha": alpha}, precision="bf16-mixed")


class _Sharded(InFp8):
    """A module whose blocks are units of FSDP2 if Lightning's strategy for these trains it."""

    @override
    def configure_model(self) -> None:
        if not isinstance(self.trainer.strategy, MemoStrategy):
            model: Any = self.model
            mesh: Any = self.device_mesh
            for block in model.blocks:
                fully_shard(block, mesh=mesh["data_parallel"])
            fully_shard(model, mesh=mesh["data_parallel"], reshard_after_forward=False)


@slow_if(lambda recipe, alpha: recipe != "delayed" or alpha == 0.5)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blocks", "mxfp8"])
def test_zero_trains_bit_by_bit_as_fsdp2(recipe: str, alpha: float) -> None:
    """Modules quantize gathered weights again in the backward, by the scales of the next forward."""

    def module() -> InFp8:
        return _Sharded(recipe_of(recipe), lambda: PlainModel([_Block() for _ in range(LAYERS)], hidden=HIDDEN))

    memo = {"alpha": alpha, "zero_stage": 3}
    result = _compare(recipe, module, memo, other=ModelParallelStrategy(), precision="bf16-true")
    assert all(m.is_fsdp2 for block in result.module.model.blocks for m in (block.qkv, block.out, block.mlp))


def test_planned_memory() -> None:
    """The package may keep buffers that it has allocated in a step."""
    _compare("delayed", _module("delayed"), {"alpha": 0.5, "plan_memory": True})


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_the_plugin_of_lightning(alpha: float) -> None:
    def plugin() -> TransformerEnginePrecision:
        return TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe_of("delayed"))

    def module() -> LanguageModel:
        return LanguageModel(lambda: PlainModel([_PlainBlock() for _ in range(LAYERS)], hidden=HIDDEN))

    result = _compare("delayed", module, {"alpha": alpha}, plugin)
    assert any(type(m) is engine().Linear for m in result.module.modules())
