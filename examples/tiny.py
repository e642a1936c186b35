"""A model and documents that take seconds on a CPU, for examples without your own model and documents."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

KNOWN_POSITIONS = 64


def save_model(folder: Path) -> str:
    """Saves a Llama with 0.1 M weights, 64 positions and one token per byte, and returns its folder."""
    config = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=KNOWN_POSITIONS, bos_token_id=None, eos_token_id=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    return str(folder / "model")


def write_documents(folder: Path, count: int = 40) -> str:
    """Writes documents that contain numbers in order, as JSON lines.

    Each document is longer than the previous one; forty documents have 20 to 800 characters.

    Args:
        folder: Folder in which the file is created.
        count: Number of documents.

    Returns:
        The path of the file.
    """
    path = folder / "documents.jsonl"
    texts = [" ".join(str(first + n) for n in range(5 * (1 + first))) for first in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)
