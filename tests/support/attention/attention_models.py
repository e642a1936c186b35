"""Small models whose attention is not plain: sinks, caps, biases, other lengths and other head sizes."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from support.families import VOCABULARY, make_batch
from support.harness import Batch

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
_DECODER: dict[str, Any] = _SPECIAL | {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "attention_dropout": 0.0,
}  # fmt: skip
_ENCODER_DECODER: dict[str, Any] = _SPECIAL | {
    "vocab_size": VOCABULARY, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "dropout": 0.0,
    "decoder_start_token_id": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
}  # fmt: skip


def _causal(config: Any, **settings: Any) -> nn.Module:
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, **settings)
    with torch.no_grad():  # sinks, biases and similar parameters begin at zero or with values that are not set
        for p in model.parameters():
            if p.dim() == 1 and not bool((p == 1).all()):
                p.normal_(0, 0.5)
    return model


def gpt_oss() -> nn.Module:
    return _causal(
        transformers.GptOssConfig(
            **_DECODER, num_local_experts=2, num_experts_per_tok=1, sliding_window=24,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    )  # fmt: skip


def gemma2() -> nn.Module:
    config = transformers.Gemma2Config(
        **_DECODER, attn_logit_softcapping=0.5, query_pre_attn_scalar=8, sliding_window=24
    )
    return _causal(config)


def deepseek_v3() -> nn.Module:
    sizes = {name: value for name, value in _DECODER.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    return _causal(
        transformers.DeepseekV3Config(**sizes, **_LATENT, **experts, moe_intermediate_size=32, first_k_dense_replace=3)
    )


def deepseek_v2() -> nn.Module:
    """Return a model with a single rotary table of complex numbers."""
    sizes = {name: value for name, value in _DECODER.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    return _causal(transformers.DeepseekV2Config(**sizes, **_LATENT, first_k_dense_replace=3))


def minicpm3() -> nn.Module:
    sizes = {name: value for name, value in _DECODER.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    return _causal(transformers.MiniCPM3Config(**sizes, **_LATENT))


def doge() -> nn.Module:
    """Return a model whose attention masks depend on weights."""
    sizes = {name: value for name, value in _DECODER.items() if name != "head_dim"}
    return _causal(transformers.DogeConfig(**sizes))


def bloom() -> nn.Module:
    return _causal(
        transformers.BloomConfig(
            **_SPECIAL, vocab_size=VOCABULARY, hidden_size=32, n_layer=3, n_head=4, hidden_dropout=0.0,
            attention_dropout=0.0,
        )
    )  # fmt: skip


def mpt() -> nn.Module:
    return _causal(transformers.MptConfig(**_SPECIAL, vocab_size=VOCABULARY, d_model=32, n_layers=3, n_heads=4))


def falcon_alibi() -> nn.Module:
    return _causal(
        transformers.FalconConfig(
            **_SPECIAL, vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, alibi=True
        )
    )


def bart(**settings: Any) -> nn.Module:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**_ENCODER_DECODER, **settings))


def bart_decoder() -> nn.Module:
    """Return a decoder that takes no position ids."""
    return _causal(transformers.BartConfig(**_ENCODER_DECODER))


def camembert_decoder() -> nn.Module:
    """Return a decoder that counts positions from the id of the padding token."""
    sizes = {name: value for name, value in _DECODER.items() if name not in ("head_dim", "num_key_value_heads")}
    return _causal(
        transformers.CamembertConfig(
            **sizes, is_decoder=True, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
        )
    )


def bart_eager() -> nn.Module:
    return bart(attn_implementation="eager")


def whisper() -> nn.Module:
    return transformers.WhisperForConditionalGeneration(
        transformers.WhisperConfig(
            **_ENCODER_DECODER, num_mel_bins=8, max_source_positions=50, max_target_positions=96,
        )
    )  # fmt: skip


def t5(**settings: Any) -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            **_SPECIAL, vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4,
            decoder_start_token_id=0, dropout_rate=0.0, **settings,
        )
    )  # fmt: skip


def t5_eager() -> nn.Module:
    return t5(attn_implementation="eager")


class CrossBlock(nn.Module):
    """A layer of a decoder: causal attention to its own tokens, then attention to another sequence."""

    def __init__(self, hidden: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(hidden) for _ in range(3))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.query, self.key_value = nn.Linear(hidden, hidden), nn.Linear(hidden, 2 * hidden)
        self.cross_out = nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 64), nn.GELU(), nn.Linear(64, hidden))

    def split(self, t: Tensor, parts: int) -> tuple[Tensor, ...]:
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in t.chunk(parts, -1))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(self.norm1(x)), 3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        q, k, v = *self.split(self.query(self.norm2(x)), 1), *self.split(self.key_value(other), 2)
        x = x + self.cross_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm3(x))


class CrossDecoder(nn.Module):
    """A decoder by hand, whose layers attend to embedded tokens of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.other = nn.Embedding(VOCABULARY, 32), nn.Embedding(VOCABULARY, 32)
        self.layers = nn.ModuleList([CrossBlock() for _ in range(3)])
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, other_ids: Tensor) -> Any:
        x, other = self.embed(input_ids), self.other(other_ids)
        for layer in self.layers:
            x = layer(x, other)
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


class ReadingBlock(CrossBlock):
    """A layer that attends to some tokens of another sequence only."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        q, k, v = *self.split(self.query(self.norm2(x)), 1), *self.split(self.key_value(other), 2)
        seen = torch.arange(other.shape[1]).expand(x.shape[1], -1) < other.shape[1] - 3
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.cross_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm3(x))


class ReadingDecoder(CrossDecoder):
    """A decoder of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ReadingBlock() for _ in range(3)])


class FeatureBlock(CrossBlock):
    """A layer with a second attention call, in which each token attends to parts of its own features."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(self.norm1(x)), 3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        parts = self.norm2(x).flatten(0, 1).unflatten(-1, (1, 4, 8))
        query = self.key_value.bias[:8].expand(len(parts), 1, 1, 8)
        summary = F.scaled_dot_product_attention(query, parts, parts).view(*x.shape[:2], 8)
        return x + self.mlp(self.norm3(x + self.query(summary.repeat(1, 1, 4))))


class FeatureDecoder(CrossDecoder):
    """A decoder of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FeatureBlock() for _ in range(3)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


class FlatBlock(CrossBlock):
    """A layer that takes `[tokens, hidden]`, like those of some vision towers."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.qkv(self.norm1(x))[None], 3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))[0]
        return x + self.mlp(self.norm3(x))


class FlatDecoder(FeatureDecoder):
    """Layers of which each takes all tokens of all sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([FlatBlock() for _ in range(3)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids).flatten(0, 1)
        for layer in self.layers:
            x = layer(x)
        return transformers.modeling_outputs.CausalLMOutput(loss=F.cross_entropy(self.head(x), labels.flatten()))


def qwen2_audio() -> nn.Module:
    """Return a model that takes the arguments of transformers' loss function, but computes the loss without it."""
    audio = {"encoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 32, "d_model": 32}
    text = {"model_type": "qwen2", **{name: value for name, value in _DECODER.items() if name != "use_cache"}}
    return transformers.Qwen2AudioForConditionalGeneration(
        transformers.Qwen2AudioConfig(audio_config=audio, text_config=text, audio_token_index=95)
    )


class BiasedBlock(nn.Module):
    """A layer of a decoder whose scores get a learned bias, given as the mask of attention."""

    def __init__(self, hidden: int = 32, heads: int = 4, tokens: int = 64) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.bias = nn.Parameter(torch.randn(heads, tokens, tokens))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        bias = self.bias[:, :tokens, :tokens].masked_fill(~seen, -torch.inf)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class BiasedDecoder(nn.Module):
    """A decoder of such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.layers = nn.ModuleList([BiasedBlock() for _ in range(3)])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


def text(tokens: int = 64) -> Batch:
    return {name: t.clamp(3, 90) for name, t in make_batch(2, tokens).items()}


def padded() -> Batch:
    return make_batch(2, 64, padded=True)


def other_length() -> Batch:
    return text() | {"other_ids": text(40)["input_ids"]}


def translation() -> Batch:
    return {"input_ids": text(40)["input_ids"], "labels": text()["labels"]}


def padded_translation() -> Batch:
    valid = torch.ones(2, 40, dtype=torch.long)
    valid[1, 29:] = 0
    return translation() | {"attention_mask": valid}


def speech() -> Batch:
    features = torch.randn(2, 8, 100, generator=torch.Generator().manual_seed(3))
    return {"input_features": features, "labels": text()["labels"]}


BATCHES = {
    "bart": padded_translation, "bart_eager": translation, "t5": padded_translation, "t5_eager": translation,
    "whisper": speech, "CrossDecoder": other_length, "ReadingDecoder": other_length,
}  # fmt: skip
