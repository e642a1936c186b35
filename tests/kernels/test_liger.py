"""liger-kernel's kernels in the layers: gradients of models that somebody changed by it.

Its kernels overwrite their inputs: rotary positions in the forward, feed-forwards what they saved and norms the
gradient of their output in the backward. They run on a CPU here, by Triton's interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import re
from dataclasses import replace
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from support.harness import EngineUnderTest, assert_close, assert_equal, loss_and_gradients
from support.parallel_training import whole
from support.processes import run_in_processes
from support.samples.storage_kinds import TOKENS, ByKind, everything
from support.trainer_harness import LanguageModel, Sequences, fit
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memo import MemoStrategy
from lightning_memo.engine.modules import fused_kernels

MISSING = [name for name in ("triton", "liger_kernel") if importlib.util.find_spec(name) is None]
REQUIRED = "EXTRAS_REQUIRED" in os.environ
needs_liger = pytest.mark.skipif(
    torch.cuda.is_available() or (bool(MISSING) and not REQUIRED),
    reason=f"{' and '.join(MISSING)} not installed" if MISSING else "runs compiled on a GPU: gpu/test_cuda_liger.py",
)
SIZES = {
    "vocab_size": 96, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


@pytest.fixture
def interpreter():
    from support.kernels.liger_interpreter import interpreted

    with interpreted():
        yield


def build(lora: bool = False, fused_loss: bool = False, **sizes: int) -> nn.Module:
    """A Llama that a user has patched with liger-kernel."""
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | sizes))
    apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=fused_loss)
    if lora:
        targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
        settings = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, settings)
    return model.train()


def batch_of(tokens: int = 6) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (1, tokens), generator=torch.Generator().manual_seed(2))
    return {"input_ids": ids, "labels": ids}


# ---- gradients


@needs_liger
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_gradients_are_those_of_plain_training_with_liger(lora, interpreter):
    model, batch = build(lora), batch_of()
    expected = loss_and_gradients(model, batch)
    with EngineUnderTest(model) as run:
        assert_equal(run.profile_step(batch), expected)
        assert run.engine.layer_classes.unsliceable == ""
        for alpha in (0.0, 1.0):
            run.load(alpha)
            assert_equal(run.step(batch), expected)
            run.assert_as_planned()
        run.load(0.4, slice_tokens=2)
        assert_close(run.step(batch), expected)
        run.assert_as_planned()


@needs_liger
def test_gradients_with_grouped_queries_and_all_but_a_slice_on_the_host(interpreter):
    model, batch = build(num_key_value_heads=2), batch_of()
    expected = loss_and_gradients(model, batch)
    with EngineUnderTest(model, slice_tokens=3, stream_from_host="hidden") as run:
        assert_close(run.profile_step(batch), expected)
        run.load(0.5)
        assert_close(run.step(batch), expected)


@needs_liger
def test_products_that_a_kernel_overwrites_are_stored_as_they_were(interpreter):
    """liger overwrites the outputs of `q_proj` and `k_proj`, which plans by kind store, with the rotated ones."""
    model, batch = build(), batch_of(TOKENS)
    expected = loss_and_gradients(model, batch)
    with ByKind(model) as run:
        run.profile_step(batch)
        run.load_storage(everything(run.products))
        assert_close(run.step(batch), expected)
        run.assert_as_planned()
        swap = run.engine.swap
        run.engine.load(replace(swap, memory=replace(swap.memory, slot=swap.memory.slot // 4)), TOKENS)
        assert_close(run.step(batch), expected)
        assert run.engine.memory.stats.overflow_bytes > 0  # tensors that do not fit in their slot stay on the device


@needs_liger
def test_fused_kernels_leave_what_liger_computes(interpreter, monkeypatch):
    monkeypatch.setattr(fused_kernels, "runs_triton", lambda device: True)
    model, batch = build(), batch_of()
    expected = loss_and_gradients(model, batch)
    with EngineUnderTest(model, fused_kernels=True) as run:
        assert_equal(run.profile_step(batch), expected)


# ---- the loss


def trained(strategy: Any, module: LightningModule) -> list[float]:
    data = torch.utils.data.DataLoader(Sequences(2, 8), batch_size=1)
    return fit(strategy, module, data, max_steps=2).losses


@needs_liger
def test_ligers_own_loss_is_left_in_force_and_told(interpreter, caplog):
    """With liger's fused loss, its default, `loss_chunk_tokens` has no effect."""
    expected = LanguageModel(lambda: build(fused_loss=True))
    losses = trained("auto", expected)
    module = LanguageModel(lambda: build(fused_loss=True))
    strategy = MemoStrategy(alpha=0.5, loss_chunk_tokens=3)
    with caplog.at_level("INFO"):
        found = trained(strategy, module)
    assert found == pytest.approx(losses, rel=1e-6)
    for (name, mine), theirs in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert float((mine - theirs).detach().norm() / theirs.detach().norm()) < 1e-5, name
    assert "the loss is liger-kernel's fused one, and loss_chunk_tokens is not used" in caplog.text


# ---- several processes


def _train_on_this_rank(settings: dict[str, Any], fused_loss: bool) -> tuple[str, list[float], dict[str, torch.Tensor]]:
    """Train on this process's part of two sequences; returns the refusals, the losses and the weights."""
    from support.kernels.liger_interpreter import interpreted

    with interpreted():
        module = LanguageModel(lambda: build(fused_loss=fused_loss))
        together = settings.get("context_parallel_size", settings.get("tensor_parallel_size", 1))
        data = Sequences(2, 8) if together > 1 else [Sequences(2, 8)[dist.get_rank()]]
        loader = torch.utils.data.DataLoader(data, batch_size=2 // (dist.get_world_size() // together))
        strategy = MemoStrategy(alpha=0.5, **settings)
        try:
            losses = fit(
                strategy, module, loader, max_steps=1, devices=dist.get_world_size(), use_distributed_sampler=False
            ).losses
        except ValueError as refused:
            return str(refused), [], {}
        return "", losses, {name: whole(p) for name, p in module.named_parameters()}


@needs_liger
@pytest.mark.parametrize("fused_loss", [False, True], ids=["loss in chunks", "fused loss"])
@pytest.mark.parametrize("settings", [{"zero_stage": 3}, {"context_parallel_size": 2}], ids=["zero 3", "context"])
def test_processes_train_as_one(settings, fused_loss, interpreter):
    module = LanguageModel(lambda: build(fused_loss=fused_loss))
    losses = fit("auto", module, torch.utils.data.DataLoader(Sequences(2, 8), batch_size=2), max_steps=1).losses
    outcomes = run_in_processes(2, _train_on_this_rank, settings, fused_loss)
    assert sum(found[0] for _, found, _ in outcomes) / 2 == pytest.approx(losses[0], rel=1e-6)
    for name, weight in module.named_parameters():
        assert float((outcomes[0][2][name] - weight).detach().norm() / weight.detach().norm()) < 1e-5, name


@needs_liger
def test_tensor_parallelism_is_refused(interpreter):
    outcomes = run_in_processes(2, _train_on_this_rank, {"tensor_parallel_size": 2}, False)
    for refused, _, _ in outcomes:
        assert re.fullmatch(
            r"\w+MLP runs by a kernel of liger-kernel, which takes whole weights, not shards: set [^\n]+", refused
        )
