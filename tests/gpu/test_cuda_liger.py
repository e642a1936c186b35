"""Compiled layers with liger-kernel's kernels: gradients compared with plain training with the same kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.harness import Batch, EngineUnderTest, loss_and_gradients
from torch import nn

from lightning_memo.models import ModelConfig, build_model
from lightning_memo.models.model_builder import restore_rotary

pytest.importorskip("liger_kernel")

CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
# In bf16, gradients are summed in another order, and dq in a varying one.
FARTHER = 2**-6


@pytest.fixture
def model(device: torch.device) -> Iterator[nn.Module]:
    torch.manual_seed(0)
    with device:
        model = build_model(ModelConfig(config=CONFIG, liger=True), device).to(torch.bfloat16)
    yield model
    restore_rotary(model)  # other tests' models are of the same type


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
    with EngineUnderTest(model, device=device) as run:
        profiled = run.profile_step(batch)
        assert profiled.distance(expected) <= FARTHER
        run.load(alpha, slice_tokens)
        assert run.step(batch).distance(expected) <= FARTHER
        run.assert_as_planned()
