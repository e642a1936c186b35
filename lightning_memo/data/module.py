"""The data module that feeds long sequences of text."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo.data.corpus import Corpus, CorpusConfig, load_corpus, unigram_entropy
from lightning_memo.data.loader import ChunkDataset, ResumableLoader
from lightning_memo.data.tokenizer import Tokens, load_tokenizer


class TextDataModule(LightningDataModule):
    """Documents of a folder, joined and cut to sequences of ``seq_len`` tokens.

    Batches are ``{"input_ids": [batch, seq_len], "labels": [batch, seq_len]}``. Their order depends on the seed and the
    epoch alone, and a run that is resumed within an epoch gets the batches that the uninterrupted one would have got.
    Under data parallelism each process gets batches of its own.

    Args:
        seq_len: Tokens per sequence.
        batch_size: Sequences per batch of one data-parallel process.
        path: Folder of text; None is the source of Python's standard library.
        suffix: Which files under it are documents.
        exclude: Names of folders that are left out.
        tokenizer: Folder of a Hugging Face tokenizer; None is one token per byte.
        max_bytes: Reading stops here.
        val_fraction: Fraction of the documents kept for validation.
        seed: Chooses the split and the order.
        num_workers: Processes that prepare batches.

    Raises:
        ValueError: ``seq_len`` or ``batch_size`` below their least values.
    """

    def __init__(
        self,
        seq_len: int,
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
        super().__init__()
        if seq_len < 2:
            raise ValueError(f"data.seq_len={seq_len}: give 2 or more, a token and the next one to predict")
        if batch_size < 1:
            raise ValueError(f"data.batch_size={batch_size}: give 1 or more")
        self.seq_len = seq_len
        self.batch_size = batch_size
        self._num_workers = num_workers
        self._tokenizer_folder = tokenizer
        self._config = CorpusConfig(
            path=path, suffix=suffix, exclude=exclude, max_bytes=max_bytes, val_fraction=val_fraction, seed=seed
        )
        self._corpus: Corpus | None = None
        self._loader: ResumableLoader | None = None
        self._position: dict[str, int] | None = None

    @override
    def setup(self, stage: str | None = None) -> None:
        """Reads the text, once.

        Raises:
            ValueError: The text is missing or too short for one batch each of training and validation.
        """
        if self._corpus is not None:
            return
        tokenizer = load_tokenizer(self._tokenizer_folder)
        corpus = load_corpus(self._config, tokenizer)
        _, count = self._data_parallel()
        self._check_length(corpus.train, self.batch_size * count, "training")
        # Lightning's sampler repeats sequences of validation until all processes have as many.
        self._check_length(corpus.val, (self.batch_size - 1) * count + 1, "validation")
        self.vocab_size = tokenizer.vocab_size
        self.unigram_entropy = unigram_entropy(corpus.train)
        self._corpus = corpus

    @property
    def train_sequences(self) -> int:
        """Sequences of the training text."""
        assert self._corpus is not None
        return len(self._corpus.train) // self.seq_len

    @override
    def train_dataloader(self) -> ResumableLoader:
        assert self._corpus is not None
        dataset = ChunkDataset(self._corpus.train, self.seq_len)
        limit = self.trainer.limit_train_batches if self.trainer else 1.0
        rank, count = self._data_parallel()
        batches = len(dataset) // (self.batch_size * count)
        self._loader = ResumableLoader(
            dataset,
            batch_size=self.batch_size,
            seed=self._config.seed,
            epoch_batches=limit if isinstance(limit, int) else int(batches * limit),
            num_workers=self._num_workers,
            rank=rank,
            count=count,
        )
        if self._position is not None:
            self._loader.load_state_dict(self._position)
            self._position = None
        return self._loader

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        assert self._corpus is not None
        dataset = ChunkDataset(self._corpus.val, self.seq_len)
        return DataLoader(dataset, batch_size=self.batch_size, num_workers=self._num_workers, drop_last=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        # Lightning saves the loader's state too, but forgets to restore it where the number of steps was asked for,
        # as learning rate schedules do, because then the loader is there before the checkpoint is read.
        return {} if self._loader is None else {"position": self._loader.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        position = state_dict.get("position")
        if position is None:
            return
        if self._loader is None:
            self._position = position
        else:
            self._loader.load_state_dict(position)

    def _data_parallel(self) -> tuple[int, int]:
        """Rank and size, as the strategy tells Lightning's own samplers."""
        sampler = (self.trainer.distributed_sampler_kwargs if self.trainer else None) or {"rank": 0, "num_replicas": 1}
        return sampler["rank"], sampler["num_replicas"]

    def _check_length(self, tokens: Tokens, sequences: int, use: str) -> None:
        needed = self.seq_len * sequences
        if len(tokens) < needed:
            _, count = self._data_parallel()
            processes = f" on {count} data-parallel processes" if count > 1 else ""
            raise ValueError(
                f"data.seq_len={self.seq_len} x data.batch_size={self.batch_size}{processes}: one batch needs {needed}"
                f" tokens, the {use} text has {len(tokens)}; lower one of them, or give more text (data.path,"
                " data.max_bytes, data.val_fraction)"
            )
