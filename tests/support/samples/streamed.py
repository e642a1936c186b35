"""Models for the tests of streamed attention."""

from __future__ import annotations

import peft
import torch
from torch import nn

from support.families import FAMILIES


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    if family == "llama_frozen":
        return frozen_below(build("llama_gqa"))
    if family != "llama_lora":
        return FAMILIES[family].build().train()
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    return peft.get_peft_model(FAMILIES["llama_gqa"].build(), adapters).train()


def frozen_below(model: nn.Module) -> nn.Module:
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)
    model.model.embed_tokens.requires_grad_(False)
    return model
