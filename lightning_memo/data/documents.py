"""Documents of records: the ids of their tokens, and which of these count in the loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypedDict

import numpy as np
import numpy.typing as npt
from typing_extensions import NotRequired

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
        field: Name of the field that holds a document, or its end.
        others: Names of other fields that hold parts of it.
        masked: Whether only some tokens of a document count in the loss.
    """

    tokenizer: Tokenizer
    field: str
    others: tuple[str, ...]
    masked: ClassVar[bool] = False

    @property
    def fields(self) -> list[str]:
        """Names of all fields that hold a document."""
        return [self.field, *self.others]

    @property
    def writes_date(self) -> bool:
        """Whether a record is another document on another day."""
        return False

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
