"""Documents in local JSON lines, Parquet or text files, read by Hugging Face `datasets` at once, or as a stream."""

from __future__ import annotations

import codecs
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
from typing_extensions import override

from lightning_memo.data.document_kinds import kind_of
from lightning_memo.data.document_source import DocumentSource, load_records
from lightning_memo.data.documents import Document, DocumentKind, Record, WrongRecord
from lightning_memo.data.tokenizer import Tokenizer
from lightning_memo.utils.user_errors import one_line

if TYPE_CHECKING:
    from datasets import Dataset

_FORMATS = {
    ".jsonl": "json",
    ".jsonl.gz": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
"""Format name in `datasets` by file ending; all other files are text."""
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".lz4")
"""Endings of compressed files, which `datasets` decompresses."""
_READING_ERRORS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
"""A compressed file ends too early, is damaged, or is not compressed; or the file is gone."""
_DEEPEST = 500
"""Levels of nested JSON; Arrow's recursion overflows the stack at some thousands."""
_NO_JSON = object()
_NOTHING = "corresponds to no data"
"""Part of the error message of `datasets` for files without records."""
Place = Mapping[str, Any]
"""Position in a stream at which reading continues; plain data."""


class _Refused(Exception):
    """A file has JSON that crashes the process in Arrow."""


class DocumentFiles(DocumentSource):
    """The files of a path.

    Args:
        path: File, or folder that is searched recursively.
        suffix: Ending of the file names to read in a folder; None for all known endings.
        seed: Seed of the order of the files; None for that of their names.

    Attributes:
        files: Files in the order in which they are read.

    Raises:
        ValueError: There is no such file, or `datasets` is not installed.
    """

    def __init__(self, path: str | None, suffix: str | None, seed: int | None = None) -> None:
        super().__init__(path)
        self._format, self.files = find_files(path, suffix)
        if seed is not None:
            order = np.random.default_rng(seed).permutation(len(self.files))
            self.files = [self.files[n] for n in order]
        self._checked: set[Path] = set()

    @override
    def load(self) -> Dataset:
        self._check(self.files)
        with self.reading():
            records: Dataset = self._load(streaming=False)
        return records

    @override
    def stream(self) -> Any:
        with self.reading(near=0):
            return self._load(streaming=True)  # which reads the first file to find the fields

    def _load(self, streaming: bool) -> Any:
        options = {"sample_by": "document", "encoding_errors": "replace"} if self._format == "text" else {}
        names = [str(file) for file in self.files]
        return load_records(self._format, data_files=names, split="train", streaming=streaming, **options)

    def _check(self, files: Iterable[Path]) -> None:
        for file in files:
            if file not in self._checked:
                _check_json(file)
                self._checked.add(file)

    def _where(self, is_right: Callable[[Record], bool] = lambda record: True, near: int | None = None) -> str:
        """Returns the first file and line that is no record, or else that is not right; the path if none is found.

        Args:
            is_right: Whether a record is right.
            near: As for `reading`.
        """
        files = self.files if near is None else self.files[near : near + 2]
        return _where(files, is_right) or f"path={self.path}"

    @override
    def part_of(self, opened: Any) -> int:
        state = opened.state_dict()
        while "examples_iterable" in state:
            state = state["examples_iterable"]
        return int(state["shard_idx"])

    @override
    def place_of_wrong(self, kind: DocumentKind, near: int | None) -> str:
        return self._where(kind.is_right, near)

    @override
    @contextmanager
    def reading(self, near: int | None = None) -> Iterator[None]:
        import datasets  # takes seconds

        if near is not None:
            self._check(self.files[near : near + 3])  # the one that is read next is among them
        level = datasets.logging.get_verbosity()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs errors with row numbers of file chunks
        try:
            yield
        except WrongRecord:
            raise
        except StopIteration:
            raise ValueError(
                f"{self._where(near=near)}: no documents in it; give a file or folder that has some"
            ) from None
        except Exception as error:  # decompressors, Arrow and JSON each raise types of their own
            if _NOTHING in str(error):
                raise ValueError(
                    f"{self._where(near=near)}: no documents in it; give a file or folder that has some"
                ) from error
            if _is_cast(error) and (others := _other_fields(self.files)):
                raise ValueError(
                    f"path={self.path}: {others}; give files of one kind, or choose them by suffix"
                ) from error
            why = f"not readable as {self._format}: {_reason(error)}"
            raise ValueError(f"{self._where(near=near)}: {why}; correct the file, or leave it out") from error
        finally:
            datasets.logging.set_verbosity(level)


class DocumentStream:
    """Documents that are read one after the other, in the order within each file.

    Args:
        source: Source of the records.
        field: Field of each record that holds the document; None for a known one. A text file is one record with the
            field `text`.
        tokenizer: Tokenizer of the documents.
        chat_template: Template of chats; see `lightning_memo.data.chats.load_chat_template`.

    Attributes:
        kind: Kind of the documents.
        parts: Number of files.

    Raises:
        ValueError: A file cannot be read, its first record has no such field, or chats are written with the date.
    """

    def __init__(
        self, source: DocumentSource, field: str | None, tokenizer: Tokenizer, chat_template: str | None = None
    ) -> None:
        self.source = source
        opened = source.stream()
        first = next(self.records(opened), None)
        if first is None:
            raise ValueError(f"path={source.path}: no documents in it; give a file or folder that has some")
        self.parts: int = opened.num_shards
        self.kind = kind_of(source.path, field, first, tokenizer, chat_template)
        if self.kind.writes_date:
            raise ValueError(
                "chat_template: it writes the date, so a stream that resumes on another day would be another one; give"
                " chat_template=FILE, one without strftime_now, or streaming=False"
            )

    def records(self, opened: Any) -> Iterator[dict[str, Any]]:
        """Yields the records of an opened stream.

        Raises:
            ValueError: A file cannot be read. The message is one line with the file and line number.
        """
        records = iter(opened)
        while True:
            with self.source.reading(near=self.source.part_of(opened)):
                record = next(records, None)
            if record is None:
                return
            yield record


class DocumentReader:
    """Iterates over the records of a stream that hold a document, each with its number. Others are not counted.

    Args:
        stream: Stream to read.
        place: Position of the first document; None for the beginning.
    """

    def __init__(self, stream: DocumentStream, place: Place | None = None) -> None:
        self._stream = stream
        self._number = 0
        self._records = stream.source.stream()
        if place is not None:
            self._number = place["number"]
            self._records.load_state_dict(place["records"])
        self._documents = self._read()

    def place(self) -> Place:
        """Returns the position of the next document."""
        return {"number": self._number, "records": self._records.state_dict()}

    def __iter__(self) -> DocumentReader:
        return self

    def __next__(self) -> tuple[int, Record]:
        """Returns the number and record of the next document.

        Raises:
            ValueError: A file cannot be read, or a record is no document. The message is one line with the file and
                line number.
        """
        return next(self._documents)

    def encode(self, record: Record) -> Document:
        """Returns the document of the record that was read last.

        Raises:
            ValueError: The record is no document. The message is one line with the file and line number.
        """
        with self._naming():
            return self._stream.kind.encode(record)

    def _read(self) -> Iterator[tuple[int, Record]]:
        for record in self._stream.records(self._records):
            with self._naming():
                found = self._stream.kind.holds_document(record)
            if found:
                self._number += 1
                yield self._number - 1, record

    def _naming(self) -> AbstractContextManager[None]:
        return self._stream.source.naming(self._stream.kind, near=self._stream.source.part_of(self._records))


def is_file_name(path: str) -> bool:
    """Whether a path ends like the name of a file that can be read."""
    return path.endswith((*_FORMATS, *_COMPRESSED))


def find_files(path: str | None, suffix: str | None) -> tuple[str, list[Path]]:
    """Returns the format name in `datasets` and the files, sorted by path so that their order is the same everywhere.

    Args:
        path: File or folder.
        suffix: Ending of the file names to read; None for all known endings.

    Raises:
        ValueError: There is no such file, or files have different formats.
    """
    if path is None:
        raise ValueError("path: give the file or folder of your documents (JSON lines, Parquet or text)")
    if not isinstance(path, str | os.PathLike):
        raise ValueError(f"path={path!r}: give one file or folder, as text")
    root = Path(path).expanduser()
    if not root.exists():
        raise ValueError(f"path={path}: no such file or folder; give one with documents")
    if root.is_file():
        return _format(root), [root]
    endings = tuple(_FORMATS) if suffix is None else (suffix,)
    files = sorted(file for file in root.rglob("*") if file.is_file() and file.name.endswith(endings))
    if not files:
        raise ValueError(f"path={path}: no file there ends with {', '.join(endings)}; set suffix to that of your files")
    kinds = {_format(file): file for file in files}
    if len(kinds) > 1:
        names = ", ".join(sorted(str(file.relative_to(root)) for file in kinds.values()))
        raise ValueError(f"path={path}: files of several formats ({names}); choose one by suffix")
    return next(iter(kinds)), files


def refuse_records(file: Path) -> None:
    """Checks that a file is text.

    Raises:
        ValueError: It holds records, by its name.
    """
    if _format(file) != "text":
        raise ValueError(f"path={file}: a file of records, not text; DocumentsDataModule (data=documents) reads it")


def _format(file: Path) -> str:
    return next((kind for ending, kind in _FORMATS.items() if _uncompressed(file).endswith(ending)), "text")


def _uncompressed(file: Path) -> str:
    """Returns the name of a file without the ending of its compression."""
    return file.stem if file.suffix in _COMPRESSED else file.name


def _check_json(file: Path) -> None:
    """Checks a file for JSON that crashes the process in Arrow: values that are no records, and very deep nesting.

    The file may have another format. Other mistakes are left to `datasets`.

    Raises:
        ValueError: The file has such JSON.
    """
    if not _uncompressed(file).endswith((".json", ".jsonl")):
        return
    try:
        _refuse_crashing(file)
    except _Refused as error:
        raise ValueError(str(error)) from None


def _refuse_crashing(file: Path) -> None:
    with suppress(*_READING_ERRORS), _opened(file) as lines:
        by_line = None  # whether each line is a record; otherwise, the file is one array or object
        for number, line in enumerate(lines, 1):
            text = line.strip().removeprefix(codecs.BOM_UTF8)
            if not text:
                continue
            if by_line is None:
                by_line = text[:1] != b"[" and _parsed(text) is not _NO_JSON
                if not by_line:
                    text += b"".join(lines)
            if _depth(text) > _DEEPEST:
                raise _refusal(f"{file}, line {number}", f"it is nested more than {_DEEPEST} levels deep")
            if by_line and text[:1] != b"{" and _parsed(text) is not _NO_JSON:
                raise _refusal(f"{file}, line {number}", "it is no JSON object")
            if not by_line and isinstance(records := _parsed(text), list):
                for index, record in enumerate(records):
                    if not isinstance(record, type(records[0])) or not isinstance(record, dict | str):
                        raise _refusal(str(file), f"entry {index} of the list is no JSON object")


def _refusal(where: str, why: str) -> _Refused:
    return _Refused(f"path={where}: not readable as json: {why}; correct the file, or leave it out")


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NO_JSON


def _depth(text: bytes) -> int:
    """Returns how deep arrays and objects are nested; 0 if that is certainly not deep."""
    if text.count(b"[") + text.count(b"{") <= _DEEPEST:
        return 0
    depth = deepest = 0
    for bracket in re.findall(rb"[\[\]{}]", re.sub(rb'"(?:[^"\\]|\\.)*"', b"", text)):
        depth += 1 if bracket in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _opened(file: Path) -> Any:
    return fsspec.open(str(file), "rb", compression="infer")


def _where(files: Sequence[Path], is_right: Callable[[Record], bool]) -> str:
    """Returns the first file and line that is no JSON object, or else that is not right; empty if there is none.

    Args:
        files: Files, of which only JSON lines are searched.
        is_right: Whether a record is right.
    """
    return _first_line(files, lambda record: record is not None) or _first_line(
        files, lambda record: record is None or is_right(record)
    )


def _first_line(files: Sequence[Path], is_right: Callable[[Record | None], bool]) -> str:
    for file in files:
        if not _uncompressed(file).endswith(".jsonl"):
            continue
        number = 0
        try:
            with _opened(file) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip() and not is_right(_object_in(line)):
                        return f"path={file}, line {number}"
        except _READING_ERRORS:
            return f"path={file}, line {number + 1}"
    return ""


def _other_fields(files: Sequence[Path]) -> str:
    """Returns two files whose first records have different fields, with these; empty if there are none."""
    first: tuple[Path, list[str]] | None = None
    for file in files:
        found: list[str] = []

        def is_last(record: Record | None, found: list[str] = found) -> bool:
            found.extend(record or {})
            return False

        _first_line([file], is_last)
        if not found:
            continue
        first = first or (file, found)
        if set(found) != set(first[1]):
            return " and ".join(f"{name.name} has {', '.join(fields)}" for name, fields in (first, (file, found)))
    return ""


def _object_in(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()  # fails if a half of a surrogate pair is missing
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _reason(error: BaseException) -> str:
    """Returns the message of the innermost cause as a line, without the row, which counts within a part of a file."""
    cause = list(_causes(error))[-1]
    text = "".join(c if c.isprintable() else " " for c in str(cause))
    return re.sub(r" in row \d+$", "", one_line(text)).rstrip(".") or type(cause).__name__


def _is_cast(error: BaseException) -> bool:
    """Whether records of a file do not fit to those of the files before."""
    from datasets.table import CastError

    return any(isinstance(cause, CastError) for cause in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
