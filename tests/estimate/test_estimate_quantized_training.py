"""QLoRA: an estimate takes the bytes that training measures with bitsandbytes' weights and PEFT's adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from lightning.pytorch import LightningModule
from support.markers.extras import extra
from support.trainer_harness import batches, make_trainer

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.costs import LayerCosts
from lightning_memo.estimate import EstimateRequest, Parallelism, constants_of, load_cluster
from lightning_memo.estimate.planner_inputs import estimated_layer_costs
from lightning_memo.shapes.hf_config import shape_of
from lightning_memo.shapes.model_shape import Quantization, adapters_of

TOKENS = 1024
LORA = {"r": 8, "target_modules": "all-linear"}
CONFIG = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False,
}  # fmt: skip


class Adapters(LightningModule):
    """A Llama that is loaded in 4 bits, with adapters in all of its products."""

    def __init__(self, folder: Path, double: bool) -> None:
        super().__init__()
        settings = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=double,
        )  # fmt: skip
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=settings, dtype=torch.bfloat16, device_map="cpu"
        ).train()  # in evaluation, bitsandbytes packs weights anew on a CPU
        peft = pytest.importorskip("peft")
        self.model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **LORA))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)


def trained(folder: Path, name: Quantization) -> LayerCosts:
    extra("bitsandbytes", "quantized")
    config = transformers.AutoConfig.for_model(**CONFIG)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    ids = torch.randint(0, CONFIG["vocab_size"], (1, TOKENS))  # type: ignore[call-overload]
    strategy = MemoStrategy(alpha=0.5, fused_kernels=False, host_memory="96MiB", device_memory="300MiB")
    trainer = make_trainer(strategy, max_steps=1, default_root_dir=str(folder), precision="bf16-true")
    trainer.fit(Adapters(folder / "model", name == "nf4_double"), batches([{"input_ids": ids, "labels": ids}]))
    costs: LayerCosts = trainer.strategy.plan.costs
    return costs


@pytest.mark.parametrize("name", get_args(Quantization))
def test_bytes_are_those_that_training_measures(tmp_path: Path, name: Quantization) -> None:
    measured = trained(tmp_path, name)
    shape = replace(shape_of(CONFIG, "tiny"), adapters=adapters_of(LORA), quantization=name)
    request = EstimateRequest(
        shape=shape, cluster=load_cluster("rtx_4090"), constants=constants_of("rtx_4090"), method="memo", gpus=1,
        seq_len=TOKENS, batch_size=1, precision="bf16-true", fused_kernels=False,
    )  # fmt: skip
    told = estimated_layer_costs(request, Parallelism())
    for kind in ("input_bytes", "attention_bytes"):
        assert getattr(told, kind) == getattr(measured, kind), kind
    # No gradient goes through the first layer, which therefore saves less.
    assert told.other_bytes[1:] == measured.other_bytes[1:]
    # Each weight has a table of 16 codes, and scales that are quantised another one of 256.
    assert told.fixed_device_bytes == pytest.approx(measured.fixed_device_bytes, rel=0.02)
    assert told.transient_device_bytes == pytest.approx(measured.transient_device_bytes, rel=0.03)
    assert told.working_bytes(1.0) == pytest.approx(measured.working_bytes(1.0), rel=0.03)
