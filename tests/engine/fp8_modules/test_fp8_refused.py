"""What TransformerEngine's FP8 is not supported with ends in one line, and leaves the process usable."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.architectures.fp8_models import (
    EngineBlock,
    FromThirdStep,
    GatedBlock,
    InFp8,
    blocks_of,
    line_of,
    manager,
    recipe_of,
    recipes,
    strategy,
    trained,
)
from support.markers.slow import slow_if
from support.trainer_harness import LanguageModel, fit, loader, make_trainer
from torch import Tensor, nn
from typing_extensions import override

pytestmark = [pytest.mark.usefixtures("own_folder")]


# ---- recipes and releases

RECIPES: dict[str, tuple[Callable[[], Any], str]] = {
    "other": (lambda: recipes().NVFP4BlockScaling(), "the recipe NVFP4BlockScaling: give DelayedScaling"),
    "attention": (
        lambda: recipes().DelayedScaling(fp8_dpa=True),
        "DelayedScaling with fp8_dpa=True: leave fp8_dpa out",
    ),
    "backward": (
        lambda: recipes().MXFP8BlockScaling(backward_override="dequantized"),
        "MXFP8BlockScaling with backward_override='dequantized'",
    ),
}


@pytest.mark.parametrize("case", RECIPES)
def test_other_recipes_are_refused(te: Any, case: str) -> None:
    make, told = RECIPES[case]
    assert told in line_of(InFp8(make()))


def test_calibration_is_refused(te: Any) -> None:
    class Calibrating(InFp8):
        @override
        def loss(self, batch: dict[str, Tensor]) -> Tensor:
            with te.autocast(enabled=False, calibrating=True):
                return LanguageModel.loss(self, batch)

    assert "calibration" in line_of(Calibrating(None))


def test_activations_that_it_moves_itself_are_refused(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["transformer_engine.pytorch.cpu_offload"], "CPUOffloadEnabled", True)
    assert "leave get_cpu_offload_context out" in line_of(InFp8(recipe_of("delayed")))


def test_its_debugger_is_refused(te: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = types.SimpleNamespace(TEDebugState=types.SimpleNamespace(debug_enabled=True))
    monkeypatch.setitem(sys.modules, "transformer_engine.debug.pytorch.debug_state", state)
    assert "TransformerEngine's debugger: turn it off" in line_of(InFp8(recipe_of("delayed")))


@pytest.mark.parametrize("version", ["2.14.0", "2.21.0", ""])
def test_other_releases_are_refused(te: Any, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(sys.modules["transformer_engine"], "__version__", version)
    line = line_of(InFp8(recipe_of("delayed")))
    assert "releases 2.15 to 2.20 are known" in line and (version or "without a version") in line


@pytest.mark.parametrize("name", ["get_autocast_state", "quantization_state.autocast_depth"])
def test_a_release_without_a_name_that_is_needed_is_refused(te: Any, monkeypatch: Any, name: str) -> None:
    owner, own = manager(), name.rpartition(".")[2]
    if own == name:
        entered = te.autocast(recipe=recipe_of("delayed"))
        monkeypatch.delattr(owner, name)
        monkeypatch.setattr(type(entered), "__enter__", lambda self: owner.autocast_enter(enabled=True))
        monkeypatch.setattr(type(entered), "__exit__", lambda self, *error: None)
    else:
        state = {field: getattr(owner.quantization_state, field) for field in type(owner.quantization_state).__slots__}
        del state[own]
        monkeypatch.setattr(owner, "quantization_state", type("State", (), state)())
        monkeypatch.setattr(
            owner, "autocast_enter", lambda **given: setattr(owner.quantization_state, "fp8_enabled", True)
        )
        monkeypatch.setattr(owner, "autocast_exit", lambda *given, **more: None)
    assert f"FP8GlobalStateManager of release 2.20.2 has no {name}" in line_of(InFp8(recipe_of("delayed")))


# ---- modules


def _grouped() -> nn.Module:
    block = EngineBlock()
    block.out = sys.modules["transformer_engine.pytorch"].GroupedLinear(32, 32)
    return block


def _linear(**settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        block = EngineBlock()
        block.out = sys.modules["transformer_engine.pytorch"].Linear(32, 32, **settings)
        return block

    return build


class _Cached(EngineBlock):
    """A block that caches its FP8 weights."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x, is_first_microbatch=True)


def _derived() -> nn.Module:
    """Return a block whose linear module is one of a derived class."""
    block = _linear(tp_size=2)()
    block.out.__class__ = type("Own", (type(block.out),), {"__module__": __name__})
    return block


def _with_fp8_weights() -> nn.Module:
    block = EngineBlock()
    block.out.primary_weights_in_fp8 = True
    return block


def _with_gathered_weights() -> nn.Module:
    """Return a block with a weight of `transformer_engine.pytorch.distributed_weight`."""
    block = EngineBlock()
    block.mlp.fc1_weight.is_distributed_weight = True
    return block


class _Operation(nn.Linear):
    """A linear module of `transformer_engine.pytorch.ops`, which has no class in common with others."""


_Operation.__name__, _Operation.__module__ = "Linear", "transformer_engine.pytorch.ops.linear"


def _operation() -> nn.Module:
    block = EngineBlock()
    block.out = _Operation(32, 32)
    return block


class _Quantizing(EngineBlock):
    """A block whose linear module returns FP8."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x, fp8_output=True)


class _QuantizingGradients(EngineBlock):
    """A block whose linear module gets its arguments by position."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x, None, False, True)


BLOCKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "kind": (_grouped, "GroupedLinear of EngineBlock (known are Linear, LayerNormLinear, LayerNormMLP, LayerNorm and"),
    "operation": (_operation, "Linear of EngineBlock (known are Linear, LayerNormLinear, LayerNormMLP, LayerNorm and"),
    "derived": (_derived, "Own of EngineBlock with its own tensor or sequence parallelism"),
    "output": (_Quantizing, "Linear with fp8_output=True: leave fp8_output out"),
    "gradient": (_QuantizingGradients, "Linear with fp8_grad=True: leave fp8_grad out"),
    "checkpoint": (lambda: EngineBlock(checkpoint=True), "LayerNormMLP of EngineBlock with checkpoint=True"),
    "delayed": (_linear(delay_wgrad_compute=True), "leave fuse_wgrad_accumulation and delay_wgrad_compute out"),
    "fused": (_linear(fuse_wgrad_accumulation=True), "leave fuse_wgrad_accumulation and delay_wgrad_compute out"),
    "parallel": (_linear(tp_size=2), "Linear of EngineBlock with its own tensor or sequence parallelism"),
    "cached": (_Cached, "Linear of _Cached with cached FP8 weights: leave is_first_microbatch out"),
    "gathered": (_with_gathered_weights, "LayerNormMLP of EngineBlock with a weight that another library gathers"),
    "weights": (_with_fp8_weights, "Linear of EngineBlock with weights in FP8"),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_other_modules_are_refused(te: Any, case: str) -> None:
    build, told = BLOCKS[case]
    line = line_of(InFp8(recipe_of("delayed"), lambda: blocks_of(build)))
    assert line.startswith("in TransformerEngine's FP8, lightning_memo does not support ") and told in line


# ---- contexts


class _Entering(EngineBlock):
    """A block that enters the autocast itself."""

    def forward(self, x: Tensor) -> Tensor:
        with sys.modules["transformer_engine.pytorch"].autocast(recipe=recipe_of("delayed")):
            return super().forward(x)


class _Leaving(EngineBlock):
    """A block that leaves the autocast for a part."""

    def forward(self, x: Tensor) -> Tensor:
        with sys.modules["transformer_engine.pytorch"].autocast(enabled=False):
            x = x + self.out(x)
        return x + self.mlp(x)


class _Checkpointing(EngineBlock):
    """A block that is recomputed by TransformerEngine."""

    def forward(self, x: Tensor) -> Tensor:
        return sys.modules["transformer_engine.pytorch"].checkpoint(super().forward, x)


def test_a_layer_does_not_enter_the_autocast_itself(te: Any) -> None:
    assert "enter it around the model instead" in line_of(InFp8(None, lambda: blocks_of(_Entering)))


@pytest.mark.slow
def test_a_layer_may_leave_the_autocast(te: Any) -> None:
    _, expected = trained(None, InFp8(recipe_of("delayed"), lambda: blocks_of(_Leaving)), max_steps=4)
    _, found = trained(strategy(), InFp8(recipe_of("delayed"), lambda: blocks_of(_Leaving)), max_steps=4)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class _WithoutGradient(EngineBlock):
    """A block whose checkpointed part gets no gradient, so that TransformerEngine does not recompute it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sys.modules["transformer_engine.pytorch"].checkpoint(self.out, x.detach())


@pytest.mark.slow
def test_its_checkpointing_trains_where_it_recomputes_nothing(te: Any) -> None:
    _, expected = trained(None, InFp8(recipe_of("delayed"), lambda: blocks_of(_WithoutGradient)), max_steps=4)
    _, found = trained(strategy(), InFp8(recipe_of("delayed"), lambda: blocks_of(_WithoutGradient)), max_steps=4)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_its_own_checkpointing_is_refused(te: Any) -> None:
    line = line_of(InFp8(recipe_of("delayed"), lambda: blocks_of(_Checkpointing)))
    assert "TransformerEngine's activation checkpointing" in line and "alpha=0 is full recomputation" in line


# ---- settings

# What is given, and which of it is named. Other ways need several processes: see `test_fp8_parallel.py`.
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "slices": ({"slice_tokens": 16, "stream_from_host": "none"}, "slice_tokens=16: set slice_tokens='auto'"),
    "streamed": (
        {"slice_tokens": 16, "stream_from_host": "attention"},
        "stream_from_host='attention': set stream_from_host='auto'",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_settings_that_cut_or_share_layers_are_refused(te: Any, case: str) -> None:
    settings, told = OTHERS[case]
    assert line_of(InFp8(recipe_of("current")), **settings) == (
        "LayerNormLinear is TransformerEngine's and runs in its FP8 autocast, which is not supported with "
        f"{told}, or leave the autocast out"
    )


@slow_if(lambda case: case not in ("slices", "zero"))
@pytest.mark.parametrize("case", OTHERS)
def test_they_are_refused_when_fp8_begins(te: Any, case: str) -> None:
    settings, told = OTHERS[case]
    module = FromThirdStep(recipe_of("current"), lambda: blocks_of(GatedBlock))
    assert told in line_of(module, max_steps=4, **settings)
    assert len(module.losses) == 2


def test_layers_are_not_cut_if_slices_are_asked_for_later(te: Any) -> None:
    """Slices that a step without memory asks for need layers that can be cut."""
    result = fit(strategy(alpha=0.5), InFp8(recipe_of("mxfp8")), max_steps=2)
    assert len(result.plan.swap.storage.calls) == 2 and result.plan.swap.storage.slice_tokens is None


# ---- failures


class _Failing(InFp8):
    """Raises an error in the backward or forward of its third layer, in the third step."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(recipe_of("delayed"))
        self._where, self._error, self._left = where, error, 1
        assert self.model is not None
        layer = self.model.blocks[2]
        own = layer.forward
        layer.forward = lambda x: self._fail_in(own, x)

    def _fail_in(self, own: Any, x: Tensor) -> Tensor:
        y = own(x)
        if self.global_step == 2 and self._where == "forward":
            self._fail()
        if self.global_step == 2 and y.requires_grad and torch._C._current_graph_task_id() == -1:
            y.register_hook(lambda _: self._fail())
        return y

    def _fail(self) -> None:
        if self._left:
            self._left -= 1
            raise self._error


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_ran_out_of_memory_runs_again_with_the_same_scales(te: Any, where: str) -> None:
    _, expected = trained(None, InFp8(recipe_of("delayed")), max_steps=4)
    module = _Failing(where, torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.warns(UserWarning, match="the step is run again"):
        result, found = trained(strategy(alpha=1.0), module, max_steps=4)
    assert result.losses[-2:] == expected[0].tolist()[-2:]
    assert all(torch.equal(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_failing_layer_leaves_the_state_usable(te: Any, where: str) -> None:
    trainer = make_trainer(strategy(alpha=0.5))
    manager().reset()
    with pytest.raises(RuntimeError, match="a layer has failed"):
        trainer.fit(_Failing(where, RuntimeError("a layer has failed")), loader())
    state = manager().quantization_state
    assert state.autocast_depth == 0 and not state.fp8_enabled
    _, expected = trained(None, InFp8(recipe_of("delayed")), max_steps=3)
    _, found = trained(strategy(alpha=0.5), InFp8(recipe_of("delayed")), max_steps=3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
