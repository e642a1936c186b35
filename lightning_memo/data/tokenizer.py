"""Conversion of text to token ids: one per byte, or by a Hugging Face tokenizer."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lightning_memo.shapes.hf_config import TOKENIZER_FILES, hub_folder

Tokens = npt.NDArray[np.int32]

_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class Tokenizer:
    """The properties of a tokenizer that packing needs."""

    encode: Callable[[str], Tokens]
    """Converts text to ids, without special tokens."""
    vocab_size: int
    """Upper bound of the ids; every id is smaller."""
    eos_id: int
    """Id that ends each document."""
    of_transformers: Any = None
    """The tokenizer of transformers, which has a chat template; None for bytes."""

    def encode_document(self, text: str) -> Tokens:
        """Returns the ids of a document, followed by the end-of-sequence id."""
        return np.append(self.encode(text), np.int32(self.eos_id))


def load_tokenizer(folder: str | None) -> Tokenizer:
    """Returns the byte-level tokenizer, or the one saved in ``folder``, which may be an id on the Hub.

    Raises:
        ValueError: The folder does not exist, holds no tokenizer, or its tokenizer has no end-of-sequence token.
    """
    return _byte_tokenizer() if folder is None else _hf_tokenizer(folder)


def has_tokenizer(folder: str) -> bool:
    """Whether ``folder`` has a saved Hugging Face tokenizer. An empty name has none."""
    return bool(folder) and any((Path(folder) / name).is_file() for name in _FILES)


def refuse_bytes(model: str) -> None:
    """Checks that a model has no tokenizer, because byte ids would mean other text to it.

    Args:
        model: Folder that the model is loaded from.

    Raises:
        ValueError: The folder has a tokenizer.
    """
    if has_tokenizer(model):
        raise ValueError(
            f"tokenizer=None: that is one token per byte, and the model of {model} has a tokenizer of its own; give "
            f'tokenizer="{model}"'
        )


def _byte_tokenizer() -> Tokenizer:
    """Returns a tokenizer with one token per UTF-8 byte. Id 256 ends a document."""
    return Tokenizer(encode=_encode_bytes, vocab_size=257, eos_id=256)


def _encode_bytes(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int32)


def _hf_tokenizer(folder: str) -> Tokenizer:
    local = hub_folder(folder, TOKENIZER_FILES, "tokenizer")
    if not local.is_dir():
        raise ValueError(f"tokenizer={folder}: no such folder; give the folder of a saved tokenizer, or none for bytes")
    from transformers import AutoTokenizer  # takes seconds and is not needed for bytes

    try:
        tokenizer = AutoTokenizer.from_pretrained(local, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"tokenizer={folder}: not a Hugging Face tokenizer ({reason})") from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"tokenizer={folder}: it has no eos token, which separates documents; set one and save it")

    def encode(text: str) -> Tokens:
        return np.asarray(tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    # Not the number of ids, because some tokenizers skip numbers.
    vocab_size = max(tokenizer.get_vocab().values()) + 1
    return Tokenizer(encode=encode, vocab_size=vocab_size, eos_id=tokenizer.eos_token_id, of_transformers=tokenizer)
