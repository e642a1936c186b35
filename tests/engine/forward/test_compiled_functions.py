"""Functions compiled with `torch.compile` in layers, in the loss and around the model; copies of models in training."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import PlainBlock, PlainModel
from support.trainer_harness import LanguageModel, fit, plain
from torch import Tensor

from lightning_memo import MemoStrategy
from lightning_memo.engine.modules.layer_forward import replace_forward, run_eager

pytestmark = pytest.mark.usefixtures("own_folder")


@torch.compile(backend="aot_eager")
def compiled_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.gelu(x @ up.T) @ down.T


@torch.compile(backend="aot_eager")
def compiled_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class CompiledParts(PlainBlock):
    """Calls functions that are compiled."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(compiled_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + compiled_mlp(self.norm2(x), self.mlp[0].weight, self.mlp[2].weight)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"alpha": 0.0}, {"alpha": 0.5}, {"alpha": 1.0}, {}], ids=str)
def test_compiled_functions_run_as_they_were_written(settings: dict[str, Any]) -> None:
    """Inside layers; between steps they run compiled."""

    def module() -> LanguageModel:
        return LanguageModel(lambda: PlainModel([CompiledParts() for _ in range(3)]))

    with pytest.warns(UserWarning, match="torch.compile is off for compiled_attention and 1 more"):
        result = fit(MemoStrategy(**settings), module())
    assert result.losses == pytest.approx(plain(module()).losses, abs=3e-6)


def test_functions_are_compiled_outside_of_layers_only() -> None:
    runs: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append("compiled")
            return graph(*args)

        return run

    twice = torch.compile(lambda x: 2 * x, backend=backend)
    twice(torch.ones(3))
    assert run_eager(run_eager, twice, torch.ones(3)).sum() == 6
    with pytest.raises(ZeroDivisionError):
        run_eager(lambda: 1 / 0)
    assert runs == ["compiled"]
    twice(torch.ones(3))
    assert runs == ["compiled"] * 2


class CompiledStep(LanguageModel):
    """Computes its loss in a compiled function that calls the model."""

    def training_step(self, batch: Any, number: int) -> Tensor:
        step: Callable[..., Tensor] = torch.compile(super().training_step, backend="aot_eager")
        return step(batch, number)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_compiled_step_runs_layers_as_they_were_written(alpha: float) -> None:
    result = fit(MemoStrategy(alpha=alpha), CompiledStep())
    assert result.losses == pytest.approx(plain(LanguageModel()).losses, abs=3e-6)


@torch.compile(backend="aot_eager")
def compiled_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class CompiledLoss(LanguageModel):
    def __init__(self) -> None:
        super().__init__("llama")

    def training_step(self, batch: Any, _: int) -> Tensor:
        return compiled_loss(self.model(input_ids=batch["input_ids"]).logits, batch["input_ids"])


@pytest.mark.slow
def test_a_compiled_loss_gets_computed_logits_only() -> None:
    with pytest.raises(Exception, match=r"compiled with torch.compile gets logits .*: set loss_chunk_tokens=None"):
        fit(MemoStrategy(alpha=0.0, loss_chunk_tokens=16), CompiledLoss())
    result = fit(MemoStrategy(alpha=0.0, loss_chunk_tokens=None), CompiledLoss())
    assert result.losses == pytest.approx(plain(CompiledLoss()).losses, abs=3e-6)


@pytest.mark.slow
def test_compiled_modules_that_get_states_on_the_host_rest() -> None:
    def module() -> LanguageModel:
        made = LanguageModel()
        made.model.head = torch.compile(made.model.head, backend="aot_eager")
        return made

    with pytest.warns(UserWarning, match="torch.compile is off for model.head,"):
        result = fit(MemoStrategy(alpha=0.5, slice_tokens=8, stream_from_host="hidden"), module())
    assert result.losses == pytest.approx(plain(module()).losses, abs=3e-6)


def test_a_copy_of_a_layer_has_the_forward_that_was_set_on_it() -> None:
    """The teacher of an average is such a copy."""

    def scaled(self: PlainBlock, x: Tensor) -> Tensor:
        return 2 * PlainBlock.forward(self, x)

    block, x = PlainBlock(), torch.randn(1, 8, 32)
    block.forward = types.MethodType(scaled, block)  # type: ignore[method-assign]
    expected = block(x)
    undo = replace_forward(block, lambda layer, forward, *args: forward(*args))
    teacher = copy.deepcopy(block)
    for p in block.parameters():
        p.data.zero_()
    assert torch.equal(teacher(x), expected)
    assert teacher.forward.__self__ is teacher  # type: ignore[attr-defined]
    undo()
    undo = replace_forward(other := PlainBlock(), lambda layer, forward, *args: forward(*args))
    for copied in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert copied.forward.__self__ is copied
    undo()
