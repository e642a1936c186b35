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

_PROMPT, _COMPLETION, _TEXT = "prompt", "completion", "text"
_KNOWN = (_COMPLETION, _TEXT)
"""Fields that hold documents where the user names none."""

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
        masked: Whether only some tokens of a document count in the loss.
    """

    tokenizer: Tokenizer
    field: str
    masked: ClassVar[bool] = False

    @property
    def fields(self) -> list[str]:
        """Names of all fields that hold a document."""
        return [self.field]

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
    """Texts, each followed by the end-of-sequence token. All tokens count."""

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


@dataclass(frozen=True)
class PromptCompletions(DocumentKind):
    """Prompts with their completions, each followed by the end-of-sequence token. The prompt's tokens do not count.

    Both are tokenized together. A token that begins in the prompt and ends in the completion counts.
    """

    masked: ClassVar[bool] = True

    @property
    @override
    def fields(self) -> list[str]:
        return [_PROMPT, self.field]

    @override
    def holds_document(self, record: Record) -> bool:
        return _text(record, _PROMPT) is not None and bool(_text(record, self.field))

    @override
    def encode(self, record: Record) -> Document:
        prompt = self.tokenizer.encode(record[_PROMPT])
        ids = self.tokenizer.encode_document(record[_PROMPT] + record[self.field])
        return Document(ids=ids, counted=np.arange(len(ids)) >= _common_tokens(prompt, ids))


def _common_tokens(first: Tokens, second: Tokens) -> int:
    """Returns with how many equal tokens two texts begin."""
    size = min(len(first), len(second))
    return int(np.append(first[:size] != second[:size], True).argmax())


def kind_of(path: str | None, field: str | None, names: Iterable[str], tokenizer: Tokenizer) -> DocumentKind:
    """Returns the kind of the documents of records.

    Args:
        path: Path for messages.
        field: Name of the field that holds the documents, or their ends in the case of `completion`; None for that of
            the known names which the records have.
        names: Names of all fields of the records.
        tokenizer: Tokenizer of the documents.

    Raises:
        ValueError: The records have no such field, or several known ones.
    """
    known = sorted(names)
    if field is None:
        found = [name for name in _KNOWN if name in known and (name != _COMPLETION or _PROMPT in known)]
        field = found[0] if len(found) == 1 else None
    else:
        found = []
    if field not in known:
        choice = " or ".join(f"field={name}" for name in found or known)
        remedy = choice if found or len(known) == 1 else "the one that holds the documents"
        given = "field" if field is None else f"field={field}"
        raise ValueError(f"{given}: the documents of path={path} have {', '.join(known)}; give {remedy}")
    if field == _COMPLETION and _PROMPT in known:
        return PromptCompletions(tokenizer, field)
    return Texts(tokenizer, field)
