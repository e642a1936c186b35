"""The data module that feeds documents of JSON lines, Parquet or text files, none of which sees another."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from lightning_memo.data.corpus import entropy
from lightning_memo.data.document_files import read_documents
from lightning_memo.data.packing import Numbers, PackedRows, PaddedRows
from lightning_memo.data.sequences import Loaded, SequenceDataModule
from lightning_memo.data.tokenizer import Tokenizer, Tokens, load_tokenizer

log = logging.getLogger(__name__)

_AT_ONCE = 16  # records that are tokenized and written together; a long document has megabytes


class DocumentsDataModule(SequenceDataModule):
    """Documents packed into rows of ``seq_len`` tokens, or one document in each row.

    Batches are ``{"input_ids", "labels", "position_ids"}``, ``[batch, seq_len]`` each, with positions that restart in
    each document; with ``packing=False`` ``{"input_ids", "labels", "attention_mask"}``, padded on the right. Their
    order is that of `lightning_memo.data.sequences.SequenceDataModule`.

    Tokens are kept on disk, in the cache of `datasets`, and mapped into memory: another run with the same files and
    tokenizer starts at once.

    Args:
        path: A file, or a folder that is searched: ``.jsonl``, ``.json``, ``.parquet``, or text files of one document
            each.
        seq_len: Tokens of a row.
        batch_size: Rows per batch of one data-parallel process.
        field: The documents' text in records of JSON or Parquet.
        suffix: Which files of the folder are read; None: all that have one of the formats.
        tokenizer: Folder of a Hugging Face tokenizer; None is one token per byte.
        packing: False: one document in each row, cut or padded to its length.
        val_fraction: Fraction of the documents kept for validation; at least one document.
        seed: Chooses the split and the order.
        num_workers: Processes that tokenize, and that prepare batches.

    Raises:
        ValueError: ``seq_len`` or ``batch_size`` below their least values, or a fraction outside (0, 1).
    """

    def __init__(
        self,
        path: str | None,
        seq_len: int,
        batch_size: int = 1,
        field: str = "text",
        suffix: str | None = None,
        tokenizer: str | None = None,
        packing: bool = True,
        val_fraction: float = 0.05,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(seq_len, batch_size, seed, num_workers)
        if not 0 < val_fraction < 1:
            raise ValueError(f"data.val_fraction={val_fraction}: give a number between 0 and 1, both excluded")
        self._path, self._field, self._suffix = path, field, suffix
        self._tokenizer_folder = tokenizer
        self._rows = PackedRows if packing else PaddedRows
        self._val_fraction = val_fraction

    @override
    def load(self) -> Loaded:
        tokenizer = load_tokenizer(self._tokenizer_folder)
        documents = self._tokenized(tokenizer)
        lengths: Numbers = np.asarray(documents["tokens"][:], dtype=np.int64)
        order = np.random.default_rng(self._seed).permutation(len(documents))
        n_val = min(max(1, round(len(documents) * self._val_fraction)), len(documents) - 1)
        parts = np.sort(order[n_val:]), np.sort(order[:n_val])
        train, val = (documents.select_columns("ids").select(part) for part in parts)
        return Loaded(
            train=self._rows(train, lengths[parts[0]], self.seq_len, tokenizer.eos_id),
            val=self._rows(val, lengths[parts[1]], self.seq_len, tokenizer.eos_id),
            vocab_size=tokenizer.vocab_size,
            unigram_entropy=entropy(_counts(train, tokenizer.vocab_size)),
        )

    def _tokenized(self, tokenizer: Tokenizer) -> Any:
        """Records with the `ids` of each document that has text, and how many `tokens` these are."""
        records = read_documents(self._path, self._suffix, self._field)
        from datasets import Features, List, Value

        documents = records.map(
            _Tokenize(tokenizer),
            batched=True,
            batch_size=_AT_ONCE,
            writer_batch_size=_AT_ONCE,
            input_columns=[self._field],
            remove_columns=records.column_names,
            features=Features({"ids": List(Value("int32")), "tokens": Value("int64")}),
            num_proc=self.num_workers or None,
            desc="tokenize",
        )
        empty = len(records) - len(documents)
        if len(documents) < 2:
            raise ValueError(
                f"data.path={self._path}: {len(documents)} document(s) with text in data.field={self._field}, and"
                f" {empty} empty, but training and validation need one each; give more documents"
            )
        if empty:
            log.warning("data.path=%s: %d of %d documents are empty and left out.", self._path, empty, len(records))
        return documents.with_format("numpy")


@dataclass(frozen=True)
class _Tokenize:
    """What `datasets` calls on some records; it recognises its results in the cache by the tokenizer's contents."""

    tokenizer: Tokenizer

    def __call__(self, texts: list[str | None]) -> dict[str, list[Any]]:
        ids = [self._encode(text) for text in texts if text and text.strip()]
        return {"ids": ids, "tokens": [len(document) for document in ids]}

    def _encode(self, text: str) -> Tokens:
        return np.append(self.tokenizer.encode(text), np.int32(self.tokenizer.eos_id))


def _counts(documents: Any, vocab_size: int) -> Numbers:
    """How often each id occurs."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for records in documents.iter(batch_size=_AT_ONCE):
        counts += np.bincount(np.concatenate(list(records["ids"])), minlength=vocab_size)
    return counts
