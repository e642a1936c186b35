"""Small models whose layers are not in one list of modules of one class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from support.families import VOCABULARY, PlainBlock, PlainModel, make_batch

_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_ENCODER_DECODER = {
    "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2,
    "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "forced_eos_token_id": None,
}  # fmt: skip
_TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
_IMAGE = 95


class StackedModel(PlainModel):
    """A model with blocks in any containers, which run in the order of `run`.

    Args:
        blocks: The outermost container.
        run: Runs the blocks on hidden states.
    """

    def __init__(self, blocks: nn.Module, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__([])
        self.blocks = blocks
        self._run = run

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        logits = self.head(self._run(self.blocks, self.embed(input_ids)))[:, :-1]
        loss = nn.functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return transformers.modeling_outputs.CausalLMOutput(loss=loss)


def in_turn(blocks: Any, x: Tensor) -> Tensor:
    """Run modules of a container in turn, and those of containers in it."""
    for block in blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks:
        x = in_turn(block, x) if isinstance(block, (nn.ModuleList, nn.ModuleDict)) else block(x)
    return x


class WideBlock(PlainBlock):
    """Another class of block, with other shapes of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(32, 192), nn.GELU(), nn.Linear(192, 32))


def blocks(count: int) -> list[nn.Module]:
    return [PlainBlock() for _ in range(count)]


def nested() -> nn.Module:
    return StackedModel(nn.ModuleList(nn.ModuleList(blocks(2)) for _ in range(3)), in_turn)


def stages() -> nn.Module:
    return StackedModel(nn.ModuleList(nn.Sequential(*blocks(2)) for _ in range(2)), in_turn)


def mixed() -> nn.Module:
    return StackedModel(nn.ModuleList([PlainBlock(), WideBlock(), PlainBlock(), WideBlock()]), in_turn)


def sequential() -> nn.Module:
    return StackedModel(nn.Sequential(*blocks(4), nn.LayerNorm(32)), lambda layers, x: layers(x))


def by_name() -> nn.Module:
    return StackedModel(nn.ModuleDict({f"block{n}": block for n, block in enumerate(blocks(4))}), in_turn)


def repeated() -> nn.Module:
    """A single block that is called five times."""
    return PlainModel([PlainBlock()] * 5)


def last_unused() -> nn.Module:
    """A model whose loss does not depend on its last block."""

    def run(layers: nn.ModuleList, x: Tensor) -> Tensor:
        layers[3](in_turn(layers[:3], x))
        return in_turn(layers[:3], x)

    return StackedModel(nn.ModuleList(blocks(4)), run)


def never_called() -> nn.Module:
    """A model with a list of layers that are larger than its blocks, and never called."""
    model = PlainModel(blocks(3))
    model.extra = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)) for _ in range(2))
    return model


def jamba() -> nn.Module:
    config = transformers.JambaConfig(
        **_TOKENS, **_TEXT, attn_layer_period=4, attn_layer_offset=1, num_experts=2, use_mamba_kernels=False,
        use_cache=False, mamba_d_state=4, mamba_dt_rank=4,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def albert() -> nn.Module:
    config = transformers.AlbertConfig(
        **_TOKENS, embedding_size=16, hidden_size=32, num_hidden_layers=5, num_attention_heads=4, intermediate_size=64,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.AlbertForMaskedLM(config)


def xlm() -> nn.Module:
    """The parts of its layers are in parallel lists: attentions, feed-forwards and norms."""
    config = transformers.XLMConfig(
        **_TOKENS, emb_dim=32, n_layers=4, n_heads=4, dropout=0.0, attention_dropout=0.0, n_langs=1,
        max_position_embeddings=64,
    )  # fmt: skip
    return transformers.XLMWithLMHeadModel(config)


def bart() -> nn.Module:
    config = transformers.BartConfig(**_TOKENS, **_ENCODER_DECODER, max_position_embeddings=64)
    return transformers.BartForConditionalGeneration(config)


def llava(vision_layers: int = 4, feature_layer: int = -1) -> nn.Module:
    """A vision tower of 17 tokens per image, and a language model.

    Args:
        vision_layers: Number of layers of the tower.
        feature_layer: The layer whose output the language model gets. With -2, the last layer's output is not used.
    """
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=vision_layers, num_attention_heads=4, image_size=32,
        patch_size=8, projection_dim=32,
    )  # fmt: skip
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(**_TOKENS, **_TEXT), image_token_id=_IMAGE,
        vision_feature_layer=feature_layer, vision_feature_select_strategy="full",
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


def llava_batch(tokens: int, seed: int) -> dict[str, Tensor]:
    """Return a batch of `[2, 18 + tokens]` tokens, the image first."""
    batch = make_batch(2, tokens + 18, seed=seed)
    ids = batch["input_ids"].clamp_max(_IMAGE - 1)
    ids[:, 1:18] = _IMAGE
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids.clone(), "pixel_values": images}
