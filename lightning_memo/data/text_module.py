"""Data module for long sequences of concatenated text files: finds, reads, splits and concatenates them."""

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from lightning_memo.data.resumable_loader import ChunkDataset
from lightning_memo.data.sequence_module import Loaded, SequenceDataModule
from lightning_memo.data.tokenizer import Tokenizer, Tokens, load_tokenizer
from lightning_memo.utils.units import read_fraction, read_whole_number


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Settings for reading a folder of text and splitting it into training and validation text.

    Raises:
        ValueError: ``max_bytes`` is too small, or ``val_fraction`` is outside (0, 1).
    """

    path: str | None = None
    """Folder to search; None for the source of Python's standard library."""
    suffix: str = ".py"
    """Ending of the names of document files."""
    exclude: Sequence[str] = ("site-packages", "dist-packages", "test", "tests", "__pycache__")
    """Names of folders to skip."""
    max_bytes: int = 16 * 2**20
    """Number of bytes to read at most. The last document may be truncated."""
    val_fraction: float = 0.05
    """Fraction of the documents for validation; at least one document is used."""
    seed: int = 0
    """Seed of the order of the documents, which determines the documents read and those for validation."""

    def __post_init__(self) -> None:
        read_whole_number("max_bytes", self.max_bytes)
        read_fraction("val_fraction", self.val_fraction)


class TextDataModule(SequenceDataModule):
    """Documents of a folder, concatenated and split into sequences of ``seq_len`` tokens.

    Batches are ``{"input_ids": [batch, seq_len], "labels": [batch, seq_len]}``, in the order of
    `lightning_memo.data.sequence_module.SequenceDataModule`.

    Args:
        seq_len: Number of tokens per sequence, as a number or like "128K".
        batch_size: Number of sequences per batch of one data-parallel rank.
        path: Folder of text; None for the source of Python's standard library.
        suffix: Ending of the names of document files.
        exclude: Names of folders to skip.
        tokenizer: Folder of a Hugging Face tokenizer; None for one token per byte.
        max_bytes: Number of bytes to read at most.
        val_fraction: Fraction of the documents for validation.
        seed: Seed of the split and the order.
        num_workers: Number of processes that prepare batches.

    Raises:
        ValueError: ``seq_len``, ``batch_size`` or ``max_bytes`` is too small, or ``val_fraction`` is outside (0, 1).
    """

    more_text = "path, max_bytes, val_fraction"

    def __init__(
        self,
        seq_len: int | str,
        batch_size: int = 1,
        path: str | None = None,
        suffix: str = CorpusConfig.suffix,
        exclude: Sequence[str] = CorpusConfig.exclude,
        tokenizer: str | None = None,
        max_bytes: int = CorpusConfig.max_bytes,
        val_fraction: float = CorpusConfig.val_fraction,
        seed: int = CorpusConfig.seed,
        num_workers: int = 0,
    ) -> None:
        super().__init__(seq_len, batch_size, seed, num_workers, tokenizer)
        self._config = CorpusConfig(
            path=path, suffix=suffix, exclude=exclude, max_bytes=max_bytes, val_fraction=val_fraction, seed=seed
        )

    @override
    def load(self) -> Loaded:
        find_documents(self._config)  # whether there are documents comes before how they are read
        tokenizer = load_tokenizer(self.tokenizer)
        corpus = load_corpus(self._config, tokenizer)
        return Loaded(
            train=ChunkDataset(corpus.train, self.seq_len),
            val=ChunkDataset(corpus.val, self.seq_len),
            vocab_size=tokenizer.vocab_size,
            unigram_entropy=unigram_entropy(corpus.train),
        )


@dataclass(frozen=True)
class Corpus:
    """Documents concatenated to one sequence of ids for training and one for validation."""

    train: Tokens
    val: Tokens


def load_corpus(config: CorpusConfig, tokenizer: Tokenizer) -> Corpus:
    """Reads and tokenizes the text.

    Raises:
        ValueError: The folder does not exist or has fewer than two documents.
    """
    paths = find_documents(config)
    order = np.random.default_rng(config.seed).permutation(len(paths))
    documents = _read_texts([paths[i] for i in order], config.max_bytes)
    if len(documents) < 2:
        raise ValueError(
            f"path={_root(config)}: {len(documents)} document(s) with text, but training and validation need one"
            f" each; give more files, or raise max_bytes={config.max_bytes}"
        )
    n_val = min(max(1, round(len(documents) * config.val_fraction)), len(documents) - 1)
    return Corpus(train=pack(documents[n_val:], tokenizer), val=pack(documents[:n_val], tokenizer))


def find_documents(config: CorpusConfig) -> list[Path]:
    """Returns the document files, sorted by path so that a seed gives the same order everywhere.

    Raises:
        ValueError: The folder does not exist or has no such file.
    """
    root = _root(config)
    if not root.is_dir():
        found = "a file, not a" if root.is_file() else "no such"
        raise ValueError(
            f"path={root}: {found} folder; give a folder with *{config.suffix} files,"
            " or none for the source of Python's standard library"
        )
    excluded = set(config.exclude)
    paths = sorted(
        path
        for path in root.rglob(f"*{config.suffix}")
        if path.is_file() and excluded.isdisjoint(path.relative_to(root).parts[:-1])
    )
    if not paths:
        raise ValueError(f"path={root}: no file ends with suffix={config.suffix}; set the suffix of your files")
    return paths


def _read_texts(paths: Sequence[Path], max_bytes: int) -> list[str]:
    """Returns the non-empty texts of the files in the given order, ``max_bytes`` in total at most."""
    documents, left_bytes = [], max_bytes
    for path in paths:
        raw = path.read_bytes()[:left_bytes]
        left_bytes -= len(raw)
        if raw.strip():
            documents.append(raw.decode("utf-8", errors="replace"))
        if left_bytes == 0:
            break
    return documents


def pack(documents: Sequence[str], tokenizer: Tokenizer) -> Tokens:
    """Returns all documents as one sequence of ids, each followed by the end-of-sequence id."""
    eos = np.array([tokenizer.eos_id], dtype=np.int32)
    return np.concatenate([piece for text in documents for piece in (tokenizer.encode(text), eos)])


def unigram_entropy(tokens: Tokens) -> float:
    """Returns the entropy of the token frequencies in nats per token.

    It is the lowest loss of a model that ignores context. A lower loss shows that the model uses context.
    """
    return entropy(np.bincount(tokens))


def entropy(counts: npt.NDArray[np.int64]) -> float:
    """Returns the entropy in nats of a distribution given by counts."""
    frequencies = counts[counts > 0] / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def _root(config: CorpusConfig) -> Path:
    return Path(sysconfig.get_paths()["stdlib"] if config.path is None else config.path).expanduser()
