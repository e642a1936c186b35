"""Models whose loss is computed in chunks, and the memory of their logits."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import peft
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.loss.attach_loss import attach_chunked_loss
from lightning_memo.loss.lazy_logits import LazyLogits
from support.families import FAMILIES, VOCABULARY
from support.trainer_harness import forwards

CHUNK = 7
LARGE = 1999  # a vocabulary by which logits are known
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


class VocabularyWatch(TorchDispatchMode):
    """Measures the peak bytes of all storages that hold logits."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self.largest_tokens = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        for t in out if isinstance(out, tuple | list) else (out,):
            real = isinstance(t, Tensor) and not isinstance(t, LazyLogits) and not t.is_meta and t.dim() > 1
            if real and t.shape[-1] == LARGE and t.shape[-2] != LLAMA["hidden_size"]:
                self._see(t)
        return out

    def _see(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        self.largest_tokens = max(self.largest_tokens, t.numel() // LARGE)
        if storage._cdata not in self._alive:
            weakref.finalize(storage, self._alive.pop, storage._cdata, None)
        self._alive[storage._cdata] = storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
