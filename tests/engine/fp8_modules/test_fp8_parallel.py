"""TransformerEngine's modules in several processes: norms train as in one process, and FP8 is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.architectures.fp8_models import InFp8, engine, recipe_of
from support.families import FAMILIES, VOCABULARY, PlainBlock, PlainModel, make_batch
from support.markers.slow import slow_if
from support.parallel_training import Outcome, Run, joined, train, train_alone
from support.processes import run_in_processes
from support.trainer_harness import batches, make_trainer
from support.transformer_engine_stand_in import stand_in
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from lightning_memo import MemoStrategy

# The bounds of other models: sums over tokens and processes are rounded in another order.
BOUND = 1e-5
WAYS: dict[str, dict[str, Any]] = {
    "ring": {"context_parallel_size": 2},
    "ulysses": {"context_parallel_size": 2, "ulysses_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "zero 1": {"zero_stage": 1},
    "zero 3": {"zero_stage": 3},
    "offloaded": {"zero_stage": 2, "offload_state": True},
    "slice": {"stream_from_host": "model", "slice_tokens": 16},
    "streamed": {"stream_from_host": "hidden", "slice_tokens": 16},
}


def _with_norms(**sizes: Any) -> nn.Module:
    """Return a Llama with TransformerEngine's norms."""
    model = FAMILIES["llama"].build(**sizes)
    model.model.norm = engine().RMSNorm(32)
    for layer in model.model.layers:
        layer.input_layernorm, layer.post_attention_layernorm = engine().RMSNorm(32), engine().RMSNorm(32)
    return model


def _train(run: Run, settings: dict[str, Any]) -> Outcome | str:
    with stand_in():
        try:
            return train(run, {"alpha": 0.5} | settings)
        except ValueError as error:
            return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_norms_are_divided_as_those_of_pytorch(way: str) -> None:
    run = Run(_with_norms)
    answers = run_in_processes(2, _train, run, WAYS[way])
    assert not isinstance(answers[0], str), answers[0]
    found = joined(answers, WAYS[way])
    with stand_in():
        assert max(found.worst_error(train_alone(run)).values()) < BOUND


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallelism_is_refused(sequence_parallel: bool) -> None:
    settings = {"tensor_parallel_size": 2, "sequence_parallel": sequence_parallel}
    first, second = run_in_processes(2, _train, Run(_with_norms), settings)
    assert first == second and "\n" not in first
    assert first.startswith("RMSNorm is TransformerEngine's, whose kernels take whole weights, not shards")


# ---- FP8


def _with_linear(**sizes: Any) -> nn.Module:
    model = FAMILIES["llama"].build(**sizes)
    for layer in model.model.layers:
        layer.mlp.down_proj = engine().Linear(64, 32, bias=False)
    return model


def _with_head(**sizes: Any) -> nn.Module:
    model = FAMILIES["llama"].build(**sizes)
    model.lm_head = engine().Linear(32, VOCABULARY, bias=False)
    return model


class _Own(PlainModel):
    """A model of a user's own with a head in FP8, whose loss is that of divided labels."""

    def __init__(self) -> None:
        super().__init__([PlainBlock() for _ in range(2)])
        self.head = engine().Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, shift_labels: Tensor, num_items_in_batch: Any = 1, **others: Any) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).flatten(0, 1).float()
        loss = nn.functional.cross_entropy(logits, shift_labels.flatten(), reduction="sum") / num_items_in_batch
        return CausalLMOutput(loss=loss)


def _train_in_fp8(build: Callable[[], nn.Module], settings: dict[str, Any], labels: str = "labels") -> str:
    """Train in FP8, and return the line with which that is refused."""
    with stand_in():
        trainer = make_trainer(MemoStrategy(**settings), devices=2, max_steps=2)
        module, batch = InFp8(recipe_of("current"), build), make_batch(2, 48)
        try:
            trainer.fit(module, batches([{"input_ids": batch["input_ids"], labels: batch["labels"]}] * 2))
        except ValueError as error:
            hooks = [getattr(hook, "__module__", "") for hook in module.model._forward_pre_hooks.values()]
            assert not any(name.startswith("lightning_memo") for name in hooks)
            return str(error)
    return ""


TOLD = {
    "ring": "context_parallel_size=2: set context_parallel_size=1",
    "ulysses": "context_parallel_size=2: set context_parallel_size=1",
    "pipeline": "pipeline_parallel_size=2: set pipeline_parallel_size=1",
    "slice": "stream_from_host='model': set stream_from_host='auto'",
    "streamed": "stream_from_host='hidden': set stream_from_host='auto'",
}


@slow_if(lambda way: way not in ("ring", "pipeline", "streamed"))
@pytest.mark.parametrize("way", TOLD)
def test_fp8_is_refused_by_all_processes(way: str) -> None:
    first, second = run_in_processes(2, _train_in_fp8, _with_linear, WAYS[way])
    assert (
        first
        == second
        == (
            f"Linear is TransformerEngine's and runs in its FP8 autocast, which is not supported with {TOLD[way]}, or "
            "leave the autocast out"
        )
    )


@pytest.mark.parametrize("way", ["ring", "pipeline"])
def test_a_head_in_fp8_is_refused_by_all_processes(way: str) -> None:
    """With current scaling, each process would scale its own tokens."""
    first, second = run_in_processes(2, _train_in_fp8, _with_head, WAYS[way])
    assert first == second and first.startswith("Linear is TransformerEngine's and runs in its FP8 autocast, which is")


def _with_fp8_weights(**sizes: Any) -> nn.Module:
    model = _with_linear(**sizes)
    model.model.layers[1].mlp.down_proj.primary_weights_in_fp8 = True
    return model


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_in_fp8_are_refused_by_all_processes(stage: int) -> None:
    for line in run_in_processes(2, _train_in_fp8, _with_fp8_weights, {"zero_stage": stage}):
        assert line.startswith("in TransformerEngine's FP8, lightning_memo does not support Linear with weights in FP8")


def test_a_head_of_a_users_model_is_refused_by_all_processes() -> None:
    first, second = run_in_processes(2, _train_in_fp8, _Own, WAYS["ring"], "shift_labels")
    assert first == second and first.startswith("Linear is TransformerEngine's and runs in its FP8 autocast, which is")
