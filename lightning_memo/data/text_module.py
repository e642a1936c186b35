"""Data modules for token sequences: their base class, and the one for text files, which it reads and concatenates."""

from __future__ import annotations

import math
import sys
import sysconfig
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo.data.document_files import refuse_records
from lightning_memo.data.document_rows import RowStream, StreamLoader
from lightning_memo.data.resumable_loader import ChunkDataset, ResumableLoader, SequenceDataset, end_with_parent
from lightning_memo.data.tokenizer import Tokenizer, Tokens, load_tokenizer, refuse_bytes
from lightning_memo.utils.units import read_fraction, read_length, read_whole_number


@dataclass(frozen=True)
class Loaded:
    """Training and validation sequences, and properties of their tokens."""

    train: SequenceDataset | RowStream
    val: SequenceDataset
    vocab_size: int
    unigram_entropy: float
    """Entropy of the training tokens in nats per token; see `lightning_memo.data.text_module.unigram_entropy`."""


class SequenceDataModule(LightningDataModule):
    """Batches of sequences of ``seq_len`` tokens.

    Their order depends only on the seed and the epoch. A run that resumes within an epoch gets the same batches as an
    uninterrupted run. With data parallelism each rank gets its own batches.

    Args:
        seq_len: Number of tokens per sequence, as a number or like "128K".
        batch_size: Number of sequences per batch of one data-parallel rank.
        seed: Seed of the order.
        num_workers: Number of processes that prepare batches.
        tokenizer: Folder of a Hugging Face tokenizer; None for one token per byte.
        balance: Whether the sequences of a global batch cost about the same; see `DocumentsDataModule`.

    Raises:
        ValueError: ``seq_len``, ``batch_size``, ``num_workers`` or ``seed`` is no whole number, or too small.
    """

    more_text = "path, val_fraction"
    """Names of settings that can provide more tokens, for messages."""

    def __init__(
        self,
        seq_len: int | str,
        batch_size: int,
        seed: int,
        num_workers: int,
        tokenizer: str | None = None,
        balance: bool = True,
    ) -> None:
        super().__init__()
        seq_len = read_length("seq_len", seq_len)
        if seq_len < 2:
            raise ValueError(f"seq_len={seq_len}: give 2 or more, a token and the next one to predict")
        self.seq_len = seq_len
        self.batch_size = read_whole_number("batch_size", batch_size)
        self.tokenizer = tokenizer
        self.num_workers = read_whole_number("num_workers", num_workers, least=0)
        self._seed, self._balance = read_whole_number("seed", seed, least=0), balance
        self._loaded: Loaded | None = None
        self._loader: ResumableLoader | StreamLoader | None = None
        self._position: dict[str, Any] | None = None

    @abstractmethod
    def load(self) -> Loaded:
        """Reads and tokenizes the text.

        Raises:
            ValueError: There is no text, or a setting is wrong.
        """

    @override
    def setup(self, stage: str | None = None) -> None:
        """Reads the text. Later calls do nothing.

        Raises:
            ValueError: The text is missing or too short for one batch each of training and validation, or it would be
                read as bytes although the model has a tokenizer.
        """
        if self._loaded is not None:
            return
        self.check_model(getattr(self.trainer and self.trainer.lightning_module, "model_folder", None))
        loaded = self.load()
        _, count = self._data_parallel()
        if not isinstance(loaded.train, RowStream):
            self._check_length(loaded.train, self.batch_size * count, "training")
        # Lightning's sampler repeats validation sequences so that all ranks have the same number.
        self._check_length(loaded.val, (self.batch_size - 1) * count + 1, "validation")
        self.vocab_size = loaded.vocab_size
        self.unigram_entropy = loaded.unigram_entropy
        self._loaded = loaded

    def check_model(self, folder: str | None) -> None:
        """Checks that a model with a tokenizer does not get byte ids.

        Args:
            folder: Folder that the model is loaded from; None for random weights or an unknown model.

        Raises:
            ValueError: The folder has a tokenizer, and none was given.
        """
        if folder is not None and self.tokenizer is None:
            refuse_bytes(folder)

    @property
    def train_sequences(self) -> float:
        """Number of training sequences; infinite for a stream, which repeats."""
        assert self._loaded is not None
        return math.inf if isinstance(self._loaded.train, RowStream) else len(self._loaded.train)

    @override
    def train_dataloader(self) -> ResumableLoader | StreamLoader:
        assert self._loaded is not None
        train = self._loaded.train
        self._loader = self._stream_loader(train) if isinstance(train, RowStream) else self._epoch_loader(train)
        if self._position is not None:
            self._resume(self._position)
            self._position = None
        return self._loader

    def _epoch_loader(self, dataset: SequenceDataset) -> ResumableLoader:
        limit = self.trainer.limit_train_batches if self.trainer else 1.0
        rank, count = self._data_parallel()
        batches = len(dataset) // (self.batch_size * count)
        return ResumableLoader(
            dataset,
            batch_size=self.batch_size,
            seed=self._seed,
            epoch_batches=limit if isinstance(limit, int) else int(batches * limit),
            num_workers=self.num_workers,
            rank=rank,
            count=count,
            balance=self._balance,
            unfinished=self._unfinished,
        )

    def _stream_loader(self, stream: RowStream) -> StreamLoader:
        rank, count = self._data_parallel()
        batches = sys.maxsize if self.trainer is None else _batches_of_run(self.trainer)
        return StreamLoader(stream, batches, self.num_workers, rank, count, self._unfinished)

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        assert self._loaded is not None
        return DataLoader(
            self._loaded.val,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            worker_init_fn=end_with_parent,
            drop_last=True,
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        # Lightning also saves the loader's state, but does not restore it if the number of steps was read before, for
        # example by a learning rate schedule, because the loader then exists before the checkpoint is read.
        return {} if self._loader is None else {"position": self._loader.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        position = state_dict.get("position")
        if position is None:
            return
        if self._loader is None:
            self._position = position
        else:
            self._resume(position)

    def _resume(self, position: dict[str, Any]) -> None:
        assert self._loader is not None
        streamed, streams = "places" in position, isinstance(self._loader, StreamLoader)
        if streamed != streams:
            raise ValueError(
                f"ckpt_path: the checkpoint was saved with streaming={streamed}, now it is"
                f" {streams}; resume with the same, or start anew from its weights"
            )
        self._loader.load_state_dict(position)

    def _unfinished(self) -> int:
        """Returns the number of interrupted batches: 1 if a checkpoint is saved after an exception, otherwise 0."""
        if self.trainer is None:
            return 0
        batches: Any = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return int(batches.ready - batches.processed)

    def _data_parallel(self) -> tuple[int, int]:
        """Returns data-parallel rank and size, as the strategy passes them to Lightning's samplers."""
        sampler = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {"rank": 0, "num_replicas": 1}
        return sampler["rank"], sampler["num_replicas"]

    def _check_length(self, dataset: SequenceDataset, sequences: int, use: str) -> None:
        if len(dataset) < sequences:
            _, count = self._data_parallel()
            processes = f" on {count} data-parallel processes" if count > 1 else ""
            raise ValueError(
                f"seq_len={self.seq_len} x batch_size={self.batch_size}{processes}: one batch needs"
                f" {self.seq_len * sequences} tokens, the {use} text has {dataset.tokens}; lower one of them, or give"
                f" more text ({self.more_text})"
            )


def _batches_of_run(trainer: Trainer) -> int:
    """Returns the length of an epoch of a stream: all batches of the run, or the trainer's `limit_train_batches`."""
    if trainer.max_steps >= 0:
        return trainer.max_steps * trainer.accumulate_grad_batches
    if isinstance(trainer.limit_train_batches, int):
        return trainer.limit_train_batches
    raise ValueError("streaming=True: a stream has no end; give trainer.max_steps, or trainer.limit_train_batches")


@dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Settings for reading text from files and splitting it into training and validation text.

    Raises:
        ValueError: ``max_bytes`` is too small, or ``val_fraction`` is outside (0, 1).
    """

    path: str | None = None
    """Text file, or folder to search; None for the source of Python's standard library."""
    suffix: str = ".py"
    """Ending of the names of the files to read in a folder."""
    exclude: Sequence[str] = ("site-packages", "dist-packages", "test", "tests", "__pycache__")
    """Names of folders to skip."""
    max_bytes: int = 16 * 2**20
    """Number of bytes to read at most. The last document may be truncated."""
    val_fraction: float = 0.05
    """Fraction of the documents for validation; at least one document is used. A single document is cut: its end is for
    validation."""
    seed: int = 0
    """Seed of the order of the documents, which determines the documents read and those for validation."""

    def __post_init__(self) -> None:
        read_whole_number("max_bytes", self.max_bytes)
        read_fraction("val_fraction", self.val_fraction)


class TextDataModule(SequenceDataModule):
    """Text files, concatenated and split into sequences of ``seq_len`` tokens.

    Batches are ``{"input_ids": [batch, seq_len], "labels": [batch, seq_len]}``, in the order of
    `lightning_memo.data.text_module.SequenceDataModule`.

    Args:
        seq_len: Number of tokens per sequence, as a number or like "128K".
        batch_size: Number of sequences per batch of one data-parallel rank.
        path: Text file, or folder that is searched; None for the source of Python's standard library.
        suffix: Ending of the names of the files to read in a folder.
        exclude: Names of folders to skip.
        tokenizer: Folder of a Hugging Face tokenizer; None for one token per byte.
        max_bytes: Number of bytes to read at most.
        val_fraction: Fraction of the documents for validation. A single document is cut: its end is for validation.
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
        ValueError: There is no such file or folder, or no text in it.
    """
    paths = find_documents(config)
    order = np.random.default_rng(config.seed).permutation(len(paths))
    documents = _read_texts([paths[i] for i in order], config.max_bytes)
    if not documents:
        raise ValueError(f"path={_root(config)}: no text in it; give a file or folder that has some")
    if len(documents) == 1:
        train, val = cut_end(pack(documents, tokenizer), config.val_fraction)
        return Corpus(train, val)
    n_val = min(max(1, round(len(documents) * config.val_fraction)), len(documents) - 1)
    return Corpus(train=pack(documents[n_val:], tokenizer), val=pack(documents[:n_val], tokenizer))


def cut_end(tokens: Tokens, val_fraction: float) -> tuple[Tokens, Tokens]:
    """Returns the beginning of a document for training, and its end for validation.

    Args:
        tokens: Ids `[tokens]` of the document.
        val_fraction: Fraction of the tokens that is cut off.
    """
    start = len(tokens) - round(len(tokens) * val_fraction)
    return tokens[:start], tokens[start:]


def find_documents(config: CorpusConfig) -> list[Path]:
    """Returns the document files, sorted by path so that a seed gives the same order everywhere.

    Raises:
        ValueError: There is no such file or folder, it has no such file, or the file holds records.
    """
    root = _root(config)
    if root.is_file():
        refuse_records(root)
        return [root]
    if not root.is_dir():
        raise ValueError(
            f"path={root}: no such file or folder; give a text file, a folder with *{config.suffix} files,"
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
