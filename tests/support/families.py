"""Small models of every supported family, and batches for them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 96
_COMMON = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": VOCABULARY}
_LLAMA_LIKE = _COMMON | {"intermediate_size": 64, "num_key_value_heads": 4, "max_position_embeddings": 256}
_GPT2 = {
    "n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 256, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model family.

    Attributes:
        build: Function that makes the model with random weights. Keyword arguments replace settings of the family,
            by the names of Hugging Face's configurations.
        grouped: Whether attention has grouped queries. Plain training then repeats keys, and results are not exact.
        dropout: Whether training draws random numbers.
        causal: Whether attention is causal.
    """

    build: Callable[..., nn.Module]
    grouped: bool = False
    dropout: bool = False
    causal: bool = True


def _hf(config_class: str, **settings: object) -> Callable[..., nn.Module]:
    def build(**others: object) -> nn.Module:
        kind = getattr(transformers, config_class)
        changed = {kind.attribute_map.get(name, name): value for name, value in others.items()}
        # A key-value cache copies keys and values into a layout for which CPU kernels round differently.
        config = kind(**settings | changed, use_cache=False)
        return transformers.AutoModelForCausalLM.from_config(config)

    return build


class PlainBlock(nn.Module):
    """A pre-norm transformer block that calls `scaled_dot_product_attention` itself."""

    def __init__(self, hidden: int = 32, heads: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp: nn.Module = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, hidden = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, hidden // self.heads)
        q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(attended.transpose(1, 2).reshape(batch, tokens, hidden)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class PlainModel(nn.Module):
    """Embedding, a list of blocks, head and loss, with the signature of Hugging Face models."""

    def __init__(self, blocks: Sequence[nn.Module], causal_argument: bool = False, hidden: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(hidden, VOCABULARY)
        self.causal_argument = causal_argument

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> object:
        x = self.embed(input_ids)
        for block in self.blocks:
            if self.causal_argument:
                mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
                x = block(x, src_mask=mask, is_causal=True)
            else:
                x = block(x)
        logits = self.head(x)[:, :-1].float()
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


def _blocks(dropout: float = 0.0) -> Callable[..., nn.Module]:
    def build(num_hidden_layers: int = 4, num_attention_heads: int = 4) -> nn.Module:
        blocks = [PlainBlock(32, num_attention_heads, dropout) for _ in range(num_hidden_layers)]
        return PlainModel(blocks)

    return build


def _encoder(causal: bool, dropout: float = 0.0, activation: str = "gelu") -> Callable[..., nn.Module]:
    def build(num_hidden_layers: int = 4, num_attention_heads: int = 4) -> nn.Module:
        layers = [
            nn.TransformerEncoderLayer(
                32, num_attention_heads, 64, dropout, activation, batch_first=True, norm_first=True
            )
            for _ in range(num_hidden_layers)
        ]
        return PlainModel(layers, causal_argument=causal)

    return build


FAMILIES: dict[str, Family] = {
    "llama": Family(_hf("LlamaConfig", **_LLAMA_LIKE)),
    "llama_gqa": Family(_hf("LlamaConfig", **_LLAMA_LIKE | {"num_key_value_heads": 2}), grouped=True),
    "qwen2": Family(_hf("Qwen2Config", **_LLAMA_LIKE)),
    "qwen3": Family(_hf("Qwen3Config", **_LLAMA_LIKE, head_dim=8)),
    "mistral": Family(_hf("MistralConfig", **_LLAMA_LIKE, sliding_window=None)),
    "mistral_window": Family(_hf("MistralConfig", **_LLAMA_LIKE, sliding_window=24)),
    "gemma": Family(_hf("GemmaConfig", **_LLAMA_LIKE, head_dim=8)),
    "gemma3_mixed_windows": Family(
        _hf(
            "Gemma3TextConfig",
            **_LLAMA_LIKE | {"num_hidden_layers": 6},
            head_dim=8,
            sliding_window=16,
            sliding_window_pattern=3,
        )
    ),
    "phi": Family(_hf("PhiConfig", **_LLAMA_LIKE, resid_pdrop=0.0)),
    "gpt_neox": Family(_hf("GPTNeoXConfig", **_COMMON, intermediate_size=64)),
    "gpt2_dropout": Family(_hf("GPT2Config", **_GPT2), dropout=True),
    "gpt2": Family(_hf("GPT2Config", **_GPT2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)),
    "mixtral": Family(_hf("MixtralConfig", **_LLAMA_LIKE, num_local_experts=4, sliding_window=None)),
    "qwen3_moe": Family(
        _hf("Qwen3MoeConfig", **_LLAMA_LIKE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
    "block": Family(_blocks()),
    "block_dropout": Family(_blocks(dropout=0.2), dropout=True),
    "encoder_layer": Family(_encoder(causal=False, activation="relu"), causal=False),
    "encoder_layer_dropout": Family(_encoder(causal=False, dropout=0.1), causal=False, dropout=True),
    "encoder_layer_causal": Family(_encoder(causal=True)),
}

_BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
# Mixtures of experts with a load-balancing loss that matters.
BALANCED: dict[str, Callable[..., nn.Module]] = {
    "mixtral_balanced": functools.partial(FAMILIES["mixtral"].build, **_BALANCED),
    "qwen3_moe_balanced": functools.partial(FAMILIES["qwen3_moe"].build, **_BALANCED),
    "granitemoe_balanced": _hf(
        "GraniteMoeConfig", **_LLAMA_LIKE, **_BALANCED, num_local_experts=4, num_experts_per_tok=2
    ),
}


def make_batch(batch: int, tokens: int, padded: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Return `input_ids` and `labels` `[batch, tokens]`, optionally with padding on the right."""
    ids = torch.randint(0, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    if not padded:
        return {"input_ids": ids, "labels": ids.clone()}
    lengths = torch.linspace(tokens, tokens // 3, batch).long() if batch > 1 else torch.tensor([tokens - tokens // 4])
    mask = (torch.arange(tokens) < lengths[:, None]).long()
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}
