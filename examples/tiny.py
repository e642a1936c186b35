"""A model and documents that take seconds on a CPU, for examples that are tried without any of one's own."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

KNOWN_POSITIONS = 64


def save_model(folder: Path) -> str:
    """A Llama of 0.1 M weights that knows 64 positions, its tokens being bytes; returns its folder."""
    config = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=KNOWN_POSITIONS, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return str(folder / "model")


def write_documents(folder: Path, count: int = 40) -> str:
    """Documents that count, each longer than the one before (forty: 20 to 800 characters), as JSON lines.

    Args:
        folder: Where.
        count: Number of documents.

    Returns:
        The file.
    """
    path = folder / "documents.jsonl"
    texts = [" ".join(str(first + n) for n in range(5 * (1 + first))) for first in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)
