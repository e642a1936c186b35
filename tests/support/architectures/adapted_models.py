"""Models that LoRA adapts, by PEFT and by modules of users."""

from __future__ import annotations

from typing import Any

import peft
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from support.families import FAMILIES
from support.harness import on_device

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK = 4


def build(
    family: str = "llama", targets: list[str] = ALL, dtype: torch.dtype = torch.float32, **settings: Any
) -> nn.Module:
    """A model whose weights have a type. PEFT makes its adapters in fp32, unless that type is fp64."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=settings.pop("r", RANK), target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM", **settings
    )
    return on_device(peft.get_peft_model(FAMILIES[family].build().to(dtype), config).train())


def two_adapters(**settings: Any) -> nn.Module:
    model = build(**settings)
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    model.base_model.set_adapter(["default", "second"])
    return on_device(model)


def adapters_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(dtype)
    return model


class StoredInBf16(nn.Linear):
    """Has its weight in another type than its input and its output."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight).to(x.dtype)


class Watched(StoredInBf16):
    """Reads its product behind the cast, besides returning it."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        out.detach().isfinite()
        return out


def stored_in_bf16(dtype: torch.dtype = torch.float32, base: type[nn.Linear] = StoredInBf16) -> nn.Module:
    model = build(dtype=dtype)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.base_layer.__class__ = base
            module.base_layer.bfloat16()
    return model


class ByHand(nn.Module):
    """Adds the output of an adapter in fp32 in a forward of a user's own."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, RANK, bias=False)
        self.lora_B = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        change = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype)))
        return (result + change * 2.0).to(result.dtype)


def by_hand(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES["llama"].build().to(dtype).train()
    for layer in model.model.layers:
        layer.self_attn.q_proj, layer.mlp.down_proj = ByHand(layer.self_attn.q_proj), ByHand(layer.mlp.down_proj)
    return on_device(model)


class Scaled(nn.Linear):
    """Has a product with a factor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, 1), self.weight, alpha=0.5).unflatten(0, x.shape[:2])


def scaled() -> nn.Module:
    model = build(targets=["q_proj"])
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.in_features == module.out_features:
            module.__class__, module.bias = Scaled, nn.Parameter(torch.ones(module.out_features))
    return on_device(model)


def parametrized() -> nn.Module:
    model = build()
    for layer in model.base_model.model.model.layers:
        torch.nn.utils.parametrizations.weight_norm(layer.mlp.gate_proj.lora_B["default"])
        torch.nn.utils.parametrizations.weight_norm(layer.mlp.down_proj.base_layer)
    return model


def clipped() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.OlmoConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, clip_qkv=0.5,
        pad_token_id=0, eos_token_id=1, use_cache=False,
    )  # fmt: skip
    targets = ["q_proj", "v_proj"]
    adapters = peft.LoraConfig(r=RANK, target_modules=targets, init_lora_weights=False, task_type="CAUSAL_LM")
    return on_device(peft.get_peft_model(transformers.OlmoForCausalLM(config), adapters).train())


def trained_scale() -> nn.Module:
    model = build()
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.Linear):
            module.scaling["default"] = torch.tensor(1.5)
    return model


def in_place_dropout() -> nn.Module:
    model = build(targets=["up_proj", "down_proj"], lora_dropout=0.3)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.inplace = True
    return model
