"""Data module for documents in JSON lines, Parquet or text files. Attention does not cross document boundaries."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo.data.document_files import DocumentFiles, DocumentReader, DocumentStream, is_file_name
from lightning_memo.data.document_kinds import kind_of
from lightning_memo.data.document_rows import (
    Numbers,
    PackedRows,
    PaddedRows,
    RowStream,
    StreamLoader,
    read_block,
)
from lightning_memo.data.document_source import DocumentSource
from lightning_memo.data.documents import LEAST_TOKENS, Document, DocumentKind, Record, counted_ids, has_targets
from lightning_memo.data.hub_documents import HubDocuments
from lightning_memo.data.resumable_loader import ResumableLoader
from lightning_memo.data.text_module import Loaded, SequenceDataModule, cut_end, entropy
from lightning_memo.data.tokenizer import Tokenizer, load_tokenizer
from lightning_memo.parallel.batches.packed_documents import find_mixed_documents
from lightning_memo.shapes.hf_config import is_hub_id
from lightning_memo.utils.units import read_fraction, read_whole_number

log = logging.getLogger(__name__)

_AT_ONCE = 16  # records tokenized and written together; few, because long documents have megabytes


class DocumentsDataModule(SequenceDataModule):
    """Documents packed into rows of ``seq_len`` tokens, or one document in each row.

    Batches are ``{"input_ids", "labels", "position_ids"}``, ``[batch, seq_len]`` each. Positions restart at 0 in each
    document, which confines attention to it. With ``packing=False``, which some models need, batches
    are ``{"input_ids", "labels", "attention_mask"}``, padded on the right. Their order is that of
    `lightning_memo.data.text_module.SequenceDataModule`.

    Tokens are stored in the disk cache of `datasets` and memory-mapped, so another run with the same files and
    tokenizer starts at once.

    Args:
        path: File, or folder that is searched for ``.jsonl``, ``.json``, ``.parquet`` and text files, or a data set of
            the Hugging Face Hub, like "HuggingFaceH4/ultrachat_200k". A text file is one document.
        seq_len: Number of tokens in a row, as a number or like "128K".
        batch_size: Number of rows in a batch of one data-parallel process.
        field: Field of JSON or Parquet records that holds the documents; None for the one of these that they have:
            ``text``; ``messages``, chats in which the loss is on the tokens of the assistant; or ``completion``, text
            or messages that continue the field ``prompt`` and alone count in the loss.
        suffix: Ending of the file names to read; None for all known formats.
        tokenizer: Folder of a Hugging Face tokenizer; None for one token per byte.
        packing: Whether to pack several documents into a row. Otherwise each row is one document, truncated or padded.
        val_fraction: Fraction of the documents for validation; at least one document is used. A single document is
            cut: its end is for validation.
        seed: Seed of the split and the order.
        num_workers: Number of processes that tokenize and that prepare batches. A stream takes 0, or 1 to read ahead.
        streaming: Whether to read, tokenize and pack during training, for data too large to prepare before. The seed
            determines the order of the files. A stream starts again after the last document, and the trainer sets the
            number of steps. Each data-parallel process reads every n-th document.
        buffer_rows: Number of rows of a stream that are packed and shuffled together; rounded up to whole batches.
        val_documents: Number of documents at the beginning of a stream that are used for validation, instead of
            ``val_fraction``.
        balance: Whether the packed rows of a global batch have documents of similar lengths, so that attention takes
            about as long on all data-parallel processes. Their order is still random, and every row comes once. In a
            stream, whose processes read different documents, it is the rows of similar rank by cost that come together.
        chat_template: File of a Jinja template that writes chats; "trl" for the one that TRL trains the tokenizer with;
            None for the tokenizer's own. A template marks what the assistant writes by ``{% generation %}``, or writes
            each turn alike whatever follows it.
        subset: Name of a configuration of a data set of the Hub; None for the default.
        split: Split of a data set of the Hub.

    Raises:
        ValueError: ``seq_len``, ``batch_size``, ``buffer_rows`` or ``val_documents`` is too small, ``val_fraction`` is
            outside (0, 1), or a stream has several workers.
    """

    def __init__(
        self,
        path: str | None,
        seq_len: int | str,
        batch_size: int = 1,
        field: str | None = None,
        suffix: str | None = None,
        tokenizer: str | None = None,
        packing: bool = True,
        val_fraction: float = 0.05,
        seed: int = 0,
        num_workers: int = 0,
        streaming: bool = False,
        buffer_rows: int = 32,
        val_documents: int = 100,
        balance: bool = True,
        chat_template: str | None = None,
        subset: str | None = None,
        split: str = "train",
    ) -> None:
        super().__init__(seq_len, batch_size, seed, num_workers, tokenizer, balance)
        if streaming and num_workers > 1:
            raise ValueError(f"num_workers={num_workers}: with streaming=True give 0, or 1 that reads ahead")
        self._path, self._suffix, self._field, self._chat_template = path, suffix, field, chat_template
        self._rows = PackedRows if packing else PaddedRows
        self._val_fraction, self._streaming = read_fraction("val_fraction", val_fraction), streaming
        self._subset, self._split = subset, split
        self._buffer_rows = read_whole_number("buffer_rows", buffer_rows)
        self._val_documents = read_whole_number("val_documents", val_documents)
        if streaming:
            self.more_text = "path, val_documents"

    @override
    def train_dataloader(self) -> ResumableLoader | StreamLoader:
        self._check_packing()
        return super().train_dataloader()

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        self._check_packing()
        return super().val_dataloader()

    def _check_packing(self) -> None:
        """Refuse a model to which packed rows are not several documents. The model exists when loaders are made."""
        if self._rows is PackedRows and self.trainer is not None and self.trainer.lightning_module is not None:
            resets = getattr(self.trainer.strategy, "resets_states", False)
            mixed = find_mixed_documents(self.trainer.lightning_module, resets_states=resets)
            if mixed is not None:
                raise ValueError(
                    f"packing=True puts several documents into a row, and {mixed.why}, so that documents would see "
                    f"each other: {mixed.what_to_do}give packing=False"
                )

    @override
    def load(self) -> Loaded:
        source = self._source()  # whether there are documents comes before how they are read
        tokenizer = load_tokenizer(self.tokenizer)
        return self._stream(source, tokenizer) if self._streaming else self._whole(source, tokenizer)

    def _source(self) -> DocumentSource:
        path = self._path
        if isinstance(path, str) and is_hub_id(path) and not is_file_name(path):
            return HubDocuments(path, self._subset, self._split)
        files = DocumentFiles(path, self._suffix, self._seed if self._streaming else None)
        if self._subset is not None or self._split != "train":
            given = f"subset={self._subset}, split={self._split}"
            raise ValueError(f"{given}: path={path} is no data set of the Hub, which alone has these; omit them")
        return files

    def _whole(self, source: DocumentSource, tokenizer: Tokenizer) -> Loaded:
        train, val = self._divide(self._tokenized(source, tokenizer))
        rows = self._rows_of(train, tokenizer)
        self._check_filled(rows)
        return Loaded(
            train=rows,
            val=self._rows_of(val, tokenizer),
            vocab_size=tokenizer.vocab_size,
            unigram_entropy=entropy(_counts(train, tokenizer.vocab_size)),
        )

    def _divide(self, documents: Any) -> list[Any]:
        """Returns the documents for training and those for validation."""
        if len(documents) == 1:
            from datasets import Dataset

            parts = cut_end(documents[0]["ids"], self._val_fraction)
            if "counted" in documents.features or min(map(len, parts)) < LEAST_TOKENS:
                raise ValueError(
                    f"path={self._path}: one document of {documents[0]['tokens']} tokens, which training and validation"
                    f" cannot share by val_fraction={self._val_fraction}; give more documents"
                )
            return [
                Dataset.from_dict({"ids": [ids], "tokens": [len(ids)]}, documents.features).with_format("numpy")
                for ids in parts
            ]
        order = np.random.default_rng(self._seed).permutation(len(documents))
        n_val = min(max(1, round(len(documents) * self._val_fraction)), len(documents) - 1)
        return [documents.select(np.sort(part)) for part in (order[n_val:], order[:n_val])]

    def _rows_of(self, documents: Any, tokenizer: Tokenizer) -> PackedRows | PaddedRows:
        lengths: Numbers = np.asarray(documents["tokens"][:], dtype=np.int64)
        rows = self._rows(documents.remove_columns("tokens"), lengths, self.seq_len, tokenizer.eos_id)
        return self._refuse_no_rows(rows)

    def _refuse_no_rows(self, rows: PackedRows | PaddedRows) -> PackedRows | PaddedRows:
        if not len(rows):
            raise ValueError(
                f"seq_len={self.seq_len}: no row of training, or none of validation, has a token that counts in the"
                f" loss; raise seq_len, or give more documents than those of path={self._path}"
            )
        return rows

    def _check_filled(self, rows: PackedRows | PaddedRows) -> None:
        share = rows.tokens / (len(rows) * self.seq_len)
        if share < 0.5 and isinstance(rows, PackedRows):
            log.warning(
                "path=%s: the documents fill %.0f %% of %d row(s) of %d tokens, and the rest is computed in vain; "
                "lower seq_len, or give more documents.",
                *(self._path, 100 * share, len(rows), self.seq_len),
            )

    def _stream(self, source: DocumentSource, tokenizer: Tokenizer) -> Loaded:
        """Uses the first documents for validation and streams the others."""
        documents = DocumentStream(source, self._field, tokenizer, self._chat_template)
        reader = DocumentReader(documents)
        kept = read_block(reader, enough=lambda count, tokens: count >= self._val_documents)
        start, (_, groups) = reader.place(), self._data_parallel()
        left = sum(1 for _ in islice(reader, groups))
        if left < groups:
            raise ValueError(
                f"path={self._path}: {len(kept) + left} document(s) in field={documents.kind.field}, but"
                f" validation takes {self._val_documents}, and training needs {groups}; lower val_documents,"
                " give more documents, or set streaming=False"
            )

        def rows_of(block: list[Document]) -> PackedRows | PaddedRows:
            lengths = np.array([len(document["ids"]) for document in block], dtype=np.int64)
            return self._rows(block, lengths, self.seq_len, tokenizer.eos_id)

        return Loaded(
            train=RowStream(
                documents=documents,
                start=start,
                rows_of=rows_of,
                window=-(-self._buffer_rows // self.batch_size) * self.batch_size,
                seq_len=self.seq_len,
                batch_size=self.batch_size,
                balance=self._balance,
                seed=self._seed,
            ),
            val=self._refuse_no_rows(rows_of(kept)),
            vocab_size=tokenizer.vocab_size,
            unigram_entropy=entropy(np.bincount(np.concatenate([counted_ids(document) for document in kept]))),
        )

    def _tokenized(self, source: DocumentSource, tokenizer: Tokenizer) -> Any:
        """Returns all documents that have targets, each with the number of its `tokens`."""
        records = source.load()
        with source.reading():
            first = records[0]
        kind = kind_of(self._path, self._field, first, tokenizer, self._chat_template)
        from datasets import Features, List, Value

        columns = {"ids": List(Value("int32")), "tokens": Value("int64")}
        with source.naming(kind), source.reading():  # records are decoded only here
            documents = records.map(
                _Tokenize(kind),
                batched=True,
                batch_size=_AT_ONCE,
                writer_batch_size=_AT_ONCE,
                input_columns=kind.fields,
                remove_columns=records.column_names,
                features=Features(columns | ({"counted": List(Value("bool"))} if kind.masked else {})),
                num_proc=self.num_workers or None,
                desc="tokenize",
            )
        empty = len(records) - len(documents)
        if not len(documents):
            raise ValueError(
                f"path={self._path}: none of {empty} document(s) has anything in field={kind.field}; give some"
            )
        if empty:
            log.warning(
                "path=%s: %d of %d documents have nothing in field=%s, and are left out.",
                *(self._path, empty, len(records), kind.field),
            )
        return documents.with_format("numpy")


@dataclass(frozen=True)
class _Tokenize:
    """Tokenizes a batch of records. `datasets` finds cached results by the pickled contents of the tokenizer."""

    kind: DocumentKind

    def __call__(self, *columns: list[Any]) -> dict[str, list[Any]]:
        records: list[Record] = [
            dict(zip(self.kind.fields, values, strict=True)) for values in zip(*columns, strict=True)
        ]
        documents = [self.kind.encode(record) for record in records if self.kind.holds_document(record)]
        kept = [document for document in documents if has_targets(document)]
        table: dict[str, list[Any]] = {"ids": [d["ids"] for d in kept], "tokens": [len(d["ids"]) for d in kept]}
        return table | ({"counted": [d["counted"] for d in kept]} if self.kind.masked else {})


def _counts(documents: Any, vocab_size: int) -> Numbers:
    """Returns the number of occurrences of each id among the tokens that count."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for columns in documents.iter(batch_size=_AT_ONCE):
        whole = {name: np.concatenate(list(values)) for name, values in columns.items() if name != "tokens"}
        counts += np.bincount(counted_ids(cast(Document, whole)), minlength=vocab_size)
    return counts
