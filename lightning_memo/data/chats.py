"""Chats as documents: a tokenizer's chat template writes them, and the tokens of the assistant count in the loss."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from lightning_utilities.core.imports import RequirementCache
from typing_extensions import override

from lightning_memo.data.documents import Document, DocumentKind, Record, WrongRecord
from lightning_memo.data.tokenizer import Tokenizer
from lightning_memo.utils.user_errors import one_line

PROMPT, TOOLS = "prompt", "tools"
TRL = "trl"
"""Name of the chat template that TRL trains a tokenizer with."""
_TRL = RequirementCache("trl>=1")
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ASSISTANT = "assistant"
_MUST_COUNT = (
    "give chat_template=FILE, a template that marks what the assistant writes by {% generation %}, or chat_template=trl"
)

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template with the tokenizer of transformers that tokenizes what it writes.

    Attributes:
        tokenizer: Tokenizer of transformers, with the positions of its tokens in the text.
        jinja: The template; None for the tokenizer's own, which may be one of several.
    """

    tokenizer: Any
    jinja: str | None

    @property
    def writes_date(self) -> bool:
        """Whether the template writes another text on another day."""
        return "strftime_now" in self._source(None)

    def _source(self, tools: Tools) -> str:
        source: str = self.tokenizer.get_chat_template(self.jinja, tools)
        return source

    def assistant_only(self, messages: Messages, tools: Tools) -> Document:
        """Returns a chat in which what the assistant writes counts, with the token that ends each of its turns.

        Where the template marks this by `{% generation %}`, transformers tells it. Otherwise a turn begins after what
        the template writes to ask for it, and ends where the chat would end after it.

        Raises:
            WrongRecord: The template refuses the chat, or writes a turn otherwise when others follow.
        """
        if _MARKS.search(self._source(tools)):
            found = self._apply(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
            return Document(ids=_ids(found), counted=np.asarray(found["assistant_masks"], dtype=bool))
        text = self._write(messages, tools)
        return self._tokenize(
            text, [self._turn(text, messages, n, tools) for n, m in enumerate(messages) if m["role"] == _ASSISTANT]
        )

    def completion_only(self, prompt: Messages, completion: Messages, tools: Tools) -> Document:
        """Returns a chat in which everything after the prompt counts.

        Raises:
            WrongRecord: The template refuses the chat, or writes the prompt otherwise when a completion follows.
        """
        text = self._write([*prompt, *completion], tools)
        asked = self._write(prompt, tools, add_generation_prompt=True)
        if not text.startswith(asked):
            raise WrongRecord(
                "the chat template writes the prompt otherwise when a completion follows; give chat_template=FILE, one"
                " that does not"
            )
        return self._tokenize(text, [(len(asked), len(text))])

    def _turn(self, text: str, messages: Messages, number: int, tools: Tools) -> tuple[int, int]:
        """Returns where the turn of a message begins and ends in the text of the chat."""
        if number == 0:
            raise WrongRecord(f"the assistant begins, without a message to answer; add one, or {_MUST_COUNT}")
        start = self._write(messages[:number], tools, add_generation_prompt=True)
        stop = self._write(messages[: number + 1], tools)
        if not text.startswith(stop):  # some templates end a chat, but not each turn, by this token
            stop = stop.removesuffix(self.tokenizer.eos_token)
        if not text.startswith(start) or not text.startswith(stop):
            raise WrongRecord(
                f"the chat template writes message {number + 1} otherwise when others follow it (some leave out"
                f" earlier reasoning), so what the assistant wrote is not certain; {_MUST_COUNT}"
            )
        return len(start), len(stop)

    def check_roles(self, messages: Messages, tools: Tools) -> None:
        """Checks that the template writes messages of all roles.

        Raises:
            WrongRecord: It leaves out a message.
        """
        text = self._write(messages, tools)
        for number, message in enumerate(messages):
            if message["role"] in ("user", _ASSISTANT) or len(messages) == 1:
                continue
            try:
                without = self._write([*messages[:number], *messages[number + 1 :]], tools)
            except WrongRecord:
                continue  # the template needs the message
            if without == text:
                raise WrongRecord(
                    f"the chat template leaves out messages of role={message['role']}; correct the role, or give"
                    " chat_template=FILE, one that writes them"
                )

    def _write(self, messages: Messages, tools: Tools, **settings: Any) -> str:
        text: str = self._apply(messages, tools, tokenize=False, **settings)
        return text

    def _apply(self, messages: Messages, tools: Tools, **settings: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(list(messages), tools=tools, chat_template=self.jinja, **settings)
        except Exception as error:  # what a template does not expect raises any type
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise WrongRecord(
                f"the chat template refuses a chat of the roles {roles}: {one_line(str(error)).rstrip('.')}; correct"
                " the chat, or give chat_template=FILE, one that takes it"
            ) from None

    def _tokenize(self, text: str, spans: Sequence[tuple[int, int]]) -> Document:
        """Returns a document in which all tokens count that have a character of a span."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = np.asarray(found["offset_mapping"], dtype=np.int64).reshape(-1, 2)
        counted = np.zeros(len(offsets), dtype=bool)
        for start, stop in spans:
            counted |= (offsets[:, 0] < stop) & (offsets[:, 1] > start)
        return Document(ids=_ids(found), counted=counted)


def _ids(found: Mapping[str, Any]) -> Any:
    return np.asarray(found["input_ids"], dtype=np.int32)


def load_chat_template(tokenizer: Tokenizer, chat_template: str | None) -> ChatTemplate:
    """Returns the template that writes chats.

    Args:
        tokenizer: Tokenizer of the documents.
        chat_template: File of a Jinja template; `TRL` for the one that TRL trains the tokenizer with; None for the
            tokenizer's own.

    Raises:
        ValueError: There is no such template, or the tokenizer cannot tell the positions of its tokens.
    """
    own = tokenizer.of_transformers
    if own is None:
        raise ValueError("tokenizer=None: bytes have no chat template; give the tokenizer of a chat model")
    if not own.is_fast:
        raise ValueError(
            "tokenizer: it cannot tell where its tokens are in a chat; give a folder with a tokenizer.json"
        )
    if chat_template == TRL:
        return ChatTemplate(own, _template_of_trl(own))
    if chat_template is not None:
        file = Path(chat_template).expanduser()
        if not file.is_file():
            raise ValueError(f"chat_template={chat_template}: no such file; give one with a Jinja template, or trl")
        return ChatTemplate(own, file.read_text(encoding="utf-8"))
    if not own.chat_template:
        raise ValueError(
            f"tokenizer={own.name_or_path}: it has no chat template; give chat_template=FILE, or the tokenizer of a"
            " chat model"
        )
    return ChatTemplate(own, None)


def _template_of_trl(tokenizer: Any) -> str | None:
    if not _TRL:
        raise ValueError("chat_template=trl: TRL is not installed; pip install trl, or give a file")
    from trl import get_training_chat_template  # type: ignore[attr-defined]  # takes seconds

    if not tokenizer.chat_template:
        raise ValueError(f"chat_template=trl: tokenizer={tokenizer.name_or_path} has no chat template; give a file")
    try:
        template: str | None = get_training_chat_template(tokenizer)
    except ValueError:
        raise ValueError(
            f"chat_template=trl: TRL has none for the template of tokenizer={tokenizer.name_or_path}; give a file, or"
            " none for the tokenizer's own"
        ) from None
    return template


@dataclass(frozen=True)
class _OfMessages(DocumentKind):
    """Documents that a template writes.

    Attributes:
        template: Template that writes chats.
    """

    template: ChatTemplate
    masked: ClassVar[bool] = True

    @property
    @override
    def writes_date(self) -> bool:
        return self.template.writes_date


class Chats(_OfMessages):
    """Chats: lists of messages with `role` and `content`. What the assistant writes counts."""

    @override
    def holds_document(self, record: Record) -> bool:
        return bool(_messages(record, self.field))

    @override
    def encode(self, record: Record) -> Document:
        messages, tools = _messages(record, self.field), _tools(record)
        with _quoting(messages):
            if not any(message["role"] == _ASSISTANT for message in messages):
                raise WrongRecord(
                    "no message of role=assistant, and only those count in the loss; correct the roles, or leave the"
                    " chat out"
                )
            self.template.check_roles(messages, tools)
            document = self.template.assistant_only(messages, tools)
            if not document["counted"][1:].any():
                raise WrongRecord(f"the chat template marks no token of the assistant; {_MUST_COUNT}")
            return document


class ChatCompletions(_OfMessages):
    """Chats in two parts: messages of a prompt, and those that follow, which count."""

    @override
    def holds_document(self, record: Record) -> bool:
        return bool(_messages(record, PROMPT) and _messages(record, self.field))

    @override
    def encode(self, record: Record) -> Document:
        prompt, completion, tools = _messages(record, PROMPT), _messages(record, self.field), _tools(record)
        with _quoting(prompt):
            self.template.check_roles([*prompt, *completion], tools)
            return self.template.completion_only(prompt, completion, tools)


def _messages(record: Record, field: str) -> list[dict[str, Any]]:
    """Returns the messages of a field; none if it is empty."""
    messages = _without_none(record.get(field))
    if messages is None:
        return []
    if not isinstance(messages, list):
        raise WrongRecord(
            f"field={field} holds {type(messages).__name__}, not a list of messages; give a field with messages in all"
            " records"
        )
    for number, message in enumerate(messages, 1):
        is_message = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not is_message or not message.keys() & {"content", "tool_calls"}:
            found = ", ".join(message) if isinstance(message, dict) else type(message).__name__
            raise WrongRecord(
                f"field={field}: message {number} has {found or 'nothing'}; give each a role (system, user, assistant)"
                " and content"
            )
    return messages


def _tools(record: Record) -> Any:
    """Returns the tools that a chat may call, which some data sets store as JSON text."""
    tools = record.get(TOOLS)
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise WrongRecord(f"field={TOOLS} holds text that is no JSON; give a list of tools") from None
    return _without_none(tools) or None


def _without_none(value: Any) -> Any:
    """Returns a value without empty fields: tables give each record all fields that any record has."""
    if isinstance(value, Mapping):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


@contextmanager
def _quoting(messages: Messages) -> Iterator[None]:
    """Within this context, refusals quote the beginning of the chat, by which it is found in a table."""
    try:
        yield
    except WrongRecord as error:
        beginning = textwrap.shorten(str(messages[0].get("content", "")), 40, placeholder="...")
        raise WrongRecord(f"{error} (a chat that begins {beginning!r})") from None
