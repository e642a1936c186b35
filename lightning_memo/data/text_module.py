"""Data module for long sequences of concatenated text files."""

from collections.abc import Sequence

from typing_extensions import override

from lightning_memo.data.corpus import CorpusConfig, find_documents, load_corpus, unigram_entropy
from lightning_memo.data.resumable_loader import ChunkDataset
from lightning_memo.data.sequence_module import Loaded, SequenceDataModule
from lightning_memo.data.tokenizer import load_tokenizer


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
