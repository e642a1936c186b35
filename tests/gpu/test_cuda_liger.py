"""Layers that a user changed by liger-kernel: gradients compared with plain training with the same kernels."""

from __future__ import annotations

import pytest
import torch
from support.harness import Batch, EngineUnderTest, loss_and_gradients
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama

pytest.importorskip("liger_kernel")

CONFIG = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "use_cache": False,
}  # fmt: skip
# In bf16, gradients are summed in another order, and dq in a varying one.
FARTHER = 2**-6


@pytest.fixture
def model(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    for name, value in vars(modeling_llama).items():  # other tests' models are of the same type
        monkeypatch.setitem(vars(modeling_llama), name, value)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(device, torch.bfloat16).train()
    apply_liger_kernel_to_llama(model=model, fused_linear_cross_entropy=False)
    return model


@pytest.fixture
def batch(device: torch.device) -> Batch:
    ids = torch.randint(0, 512, (1, 300), generator=torch.Generator().manual_seed(1)).to(device)
    return {"input_ids": ids, "labels": ids}


def test_liger_runs_compiled(model):
    names = {module._get_name() for module in model.modules()}
    assert {"LigerRMSNorm", "LigerSwiGLUMLP"} <= names


@pytest.mark.parametrize(("alpha", "slice_tokens"), [(0.0, None), (0.5, None), (1.0, None), (0.5, 70)])
def test_gradients_are_those_of_plain_training_with_liger(alpha, slice_tokens, model, batch, device):
    expected = loss_and_gradients(model, batch)
    with EngineUnderTest(model, device=device, fused_kernels=True) as run:
        profiled = run.profile_step(batch)
        assert profiled.distance(expected) <= FARTHER
        run.load(alpha, slice_tokens)
        assert run.step(batch).distance(expected) <= FARTHER
        run.assert_as_planned()
