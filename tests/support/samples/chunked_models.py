"""Models whose loss is computed in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
import transformers
from torch import nn

from lightning_memo.loss.attach_loss import attach_chunked_loss
from support.families import FAMILIES, VOCABULARY
from support.trainer_harness import forwards

CHUNK = 7
LLAMA = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 64, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip


def build(config: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, config)(**LLAMA | settings, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config)


def tied() -> nn.Module:
    return build("LlamaConfig", tie_word_embeddings=True)


def router_loss() -> nn.Module:
    return build("MixtralConfig", num_local_experts=4, output_router_logits=True, sliding_window=None)


def with_bias() -> nn.Module:
    model = build("LlamaConfig")
    model.lm_head = nn.Linear(32, VOCABULARY, bias=True)
    return model


def lora(*targets: str) -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=[*targets], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(build("LlamaConfig"), config)


SOFTCAP = {"final_logit_softcapping": 3.0, "head_dim": 8}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{n: FAMILIES[n].build for n in ("llama", "qwen2", "qwen3", "mistral", "gemma", "gpt_neox", "gpt2", "phi")},
    "gemma2": lambda: build("Gemma2Config", **SOFTCAP),
    "gemma3": lambda: build("Gemma3TextConfig", **SOFTCAP),
    "phi3": lambda: build("Phi3Config"),
    "granite": lambda: build("GraniteConfig", logits_scaling=8.0),
    "cohere": lambda: build("CohereConfig", logit_scale=0.25),
    "mixtral with router loss": router_loss,
    "llama tied": tied,
    "llama with a bias": with_bias,
    "llama lora": lambda: lora("q_proj"),
    "llama lora on the head": lambda: lora("q_proj", "lm_head"),
}  # fmt: skip


@contextmanager
def chunked(model: nn.Module, tokens: int = CHUNK) -> Iterator[nn.Module]:
    undo = attach_chunked_loss(model, tokens)
    assert undo
    try:
        yield model
    finally:
        for u in undo:
            u()
        assert not forwards(model) or isinstance(model, peft.PeftModel)
