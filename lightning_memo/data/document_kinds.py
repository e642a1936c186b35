"""Kinds of documents that records hold: texts, prompts with completions, and chats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from typing_extensions import override

from lightning_memo.data.chats import PROMPT, TOOLS, ChatCompletions, Chats, load_chat_template
from lightning_memo.data.documents import Document, DocumentKind, Record, WrongRecord
from lightning_memo.data.tokenizer import Tokenizer, Tokens

_MESSAGES, _COMPLETION, _TEXT = "messages", "completion", "text"
_KNOWN = (_MESSAGES, _COMPLETION, _TEXT)
"""Fields that hold documents where the user names none."""


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

    @override
    def holds_document(self, record: Record) -> bool:
        return _text(record, PROMPT) is not None and bool(_text(record, self.field))

    @override
    def encode(self, record: Record) -> Document:
        prompt = self.tokenizer.encode(record[PROMPT])
        ids = self.tokenizer.encode_document(record[PROMPT] + record[self.field])
        return Document(ids=ids, counted=np.arange(len(ids)) >= _common_tokens(prompt, ids))


def _common_tokens(first: Tokens, second: Tokens) -> int:
    """Returns with how many equal tokens two texts begin."""
    size = min(len(first), len(second))
    return int(np.append(first[:size] != second[:size], True).argmax())


def kind_of(
    path: str | None, field: str | None, first: Record, tokenizer: Tokenizer, chat_template: str | None
) -> DocumentKind:
    """Returns the kind of the documents of records.

    Args:
        path: Path for messages.
        field: Name of the field that holds the documents, or their ends in the case of `completion`; None for that of
            the known names which the records have.
        first: First record.
        tokenizer: Tokenizer of the documents.
        chat_template: As for `lightning_memo.data.chats.load_chat_template`.

    Raises:
        ValueError: The records have no such field, or several known ones, or they are chats for which there is no
            template.
    """
    known = sorted(first)
    if field is None:
        found = [name for name in _KNOWN if name in known and (name != _COMPLETION or PROMPT in known)]
        field = found[0] if len(found) == 1 else None
    else:
        found = []
    if field not in known:
        choice = " or ".join(f"field={name}" for name in found or known)
        remedy = choice if found or len(known) == 1 else "the one that holds the documents"
        given = "field" if field is None else f"field={field}"
        raise ValueError(f"{given}: the documents of path={path} have {', '.join(known)}; give {remedy}")
    is_completion, is_chat = field == _COMPLETION and PROMPT in known, isinstance(first[field], list)
    if not is_chat and field != _MESSAGES:
        return PromptCompletions(tokenizer, field, (PROMPT,)) if is_completion else Texts(tokenizer, field, ())
    template = load_chat_template(tokenizer, chat_template)
    others = (TOOLS,) if TOOLS in known else ()
    if is_completion:
        return ChatCompletions(tokenizer, field, (PROMPT, *others), template)
    return Chats(tokenizer, field, others, template)
