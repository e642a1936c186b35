"""Methods of other projects with liger-kernel's kernels: they train like the plain model, and leave it as it was."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
from support.benchmark_modules import benchmark_modules, load
from support.harness import assert_close, assert_equal, loss_and_gradients
from transformers.models.llama import modeling_llama

from lightning_memo.estimate.cluster import load_preset
from lightning_memo.models import ModelConfig, build_model

pytest.importorskip("liger_kernel")

METHODS = ("plain", "checkpointing", "selective", "selective_products", "checkpointing_async_offload")


@pytest.mark.parametrize("method", METHODS)
def test_methods_with_liger_train_like_the_plain_model_and_leave_nothing(method: str, device: torch.device) -> None:
    torch.manual_seed(0)
    config = {**load_preset("model", "llama_tiny")["config"], "num_hidden_layers": 2}
    model = build_model(ModelConfig(config=config, lora={"r": 4, "target_modules": "all-linear"})).to(device)
    ids = torch.randint(0, config["vocab_size"], (1, 300), device=device)
    batch = {"input_ids": ids, "labels": ids}
    expected, before = loss_and_gradients(model, batch), dict(vars(modeling_llama))
    with benchmark_modules(), ExitStack() as stack:
        attached = load("cells.methods").METHODS[f"{method}_liger"]
        try:
            peer = attached.attach(model, stack)
        except load("peers").Unavailable as missing:
            pytest.skip(str(missing))
        assert any(package.startswith("liger-kernel") for package in peer.packages)
        assert {"LigerRMSNorm", "LigerSwiGLUMLP"} <= {module._get_name() for module in model.modules()}
        assert modeling_llama.apply_rotary_pos_emb is not before["apply_rotary_pos_emb"]
        assert_close(loss_and_gradients(model, batch), expected, bound=1e-5)
    assert vars(modeling_llama) == before
    assert_equal(loss_and_gradients(model, batch), expected)
