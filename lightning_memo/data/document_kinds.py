"""Documents of records: the ids of their tokens, and which of these count in the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import numpy as np
import numpy.typing as npt
from typing_extensions import NotRequired, override

from lightning_memo.data.tokenizer import Tokenizer, Tokens

LEAST_TOKENS = 2
"""Smallest number of tokens in a useful document: one token and the next one to predict."""

Record = Mapping[str, Any]


class Document(TypedDict):
    """A document as tokens.

    Attributes:
        ids: Ids `[tokens]`.
        counted: Which tokens `[tokens]` count in the loss; all if it is absent.
    """

    ids: Tokens
    counted: NotRequired[npt.NDArray[np.bool_]]


def part(document: Document, start: int, stop: int) -> Document:
    """Returns the tokens from `start` to before `stop`."""
    cut = Document(ids=document["ids"][start:stop])
    if "counted" in document:
        cut["counted"] = document["counted"][start:stop]
    return cut


def has_targets(document: Document) -> bool:
    """Whether a token after the first one counts; nothing predicts the first."""
    return len(document["ids"]) >= LEAST_TOKENS and ("counted" not in document or bool(document["counted"][1:].any()))


def counted_ids(document: Document) -> Tokens:
    """Returns the ids of the tokens that count."""
    return document["ids"][document["counted"]] if "counted" in document else document["ids"]


class WrongRecord(Exception):
    """A record is no document. The message says why, and what to do."""


@dataclass(frozen=True)
class DocumentKind(ABC):
    """A kind of documents, and how records hold them.

    Attributes:
        tokenizer: Tokenizer of the documents.
        masked: Whether only some tokens of a document count in the loss.
    """

    tokenizer: Tokenizer
    masked: ClassVar[bool] = False

    @property
    @abstractmethod
    def fields(self) -> list[str]:
        """Names of the fields that hold a document."""

    @abstractmethod
    def holds_document(self, record: Record) -> bool:
        """Whether a record holds a document, or nothing.

        Raises:
            WrongRecord: Its fields hold something else.
        """

    @abstractmethod
    def encode(self, record: Record) -> Document:
        """Returns the document of a record that holds one.

        Raises:
            WrongRecord: The record has no tokens that it could teach.
        """

    def is_right(self, record: Record) -> bool:
        """Whether a record holds a document that can be encoded, or nothing."""
        try:
            return not self.holds_document(record) or bool(self.encode(record))
        except WrongRecord:
            return False


@dataclass(frozen=True)
class Texts(DocumentKind):
    """Texts, each followed by the end-of-sequence token. All tokens count.

    Attributes:
        field: Name of the field with the text.
    """

    field: str

    @property
    @override
    def fields(self) -> list[str]:
        return [self.field]

    @override
    def holds_document(self, record: Record) -> bool:
        text = _text(record, self.field)
        return bool(text and text.strip())

    @override
    def encode(self, record: Record) -> Document:
        return Document(ids=self.tokenizer.encode_document(record[self.field]))


def _text(record: Record, field: str) -> str | None:
    text = record.get(field)
    if not isinstance(text, str | None):
        raise WrongRecord(f"field={field} holds {type(text).__name__}, not text; give a field with text in all records")
    return text


def kind_of(path: str | None, field: str, names: Iterable[str], tokenizer: Tokenizer) -> DocumentKind:
    """Returns the kind of the documents of records.

    Args:
        path: Path for messages.
        field: Name of the field that holds the documents.
        names: Names of all fields of the records.
        tokenizer: Tokenizer of the documents.

    Raises:
        ValueError: The records have no such field.
    """
    known = sorted(names)
    if field not in known:
        remedy = f"give field={known[0]}" if len(known) == 1 else "give the one that holds the text"
        raise ValueError(f"field={field}: the documents of path={path} have {', '.join(known)}; {remedy}")
    return Texts(tokenizer, field)
