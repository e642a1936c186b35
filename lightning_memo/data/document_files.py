"""Documents in local JSON lines, Parquet or text files, read by Hugging Face `datasets` at once, or as a stream."""

from __future__ import annotations

import codecs
import json
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fsspec
import numpy as np
from lightning_utilities.core.imports import RequirementCache

from lightning_memo.utils.process import is_rank_zero
from lightning_memo.utils.user_errors import one_line

if TYPE_CHECKING:
    from datasets import Dataset

_DATASETS = RequirementCache("datasets>=4")
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


def read_documents(path: str | None, suffix: str | None, field: str) -> Dataset:
    """Returns the documents of a file or folder, memory-mapped from a copy in the cache of `datasets`.

    Args:
        path: File, or folder that is searched recursively.
        suffix: Ending of the file names to read; None for all known endings.
        field: Field of each record that holds the text. A text file is one record with the field `text`.

    Raises:
        ValueError: There is no such file, it cannot be read, or its records have no such text field.
    """
    _check_installed()
    kind, files = find_files(path, suffix)
    for file in files:
        _check_json(file)
    with readable(lambda: where_unreadable(path, files, field), kind):
        documents: Dataset = _load_files(kind, files, streaming=False)
    _check_field(path, field, documents.features)
    _check_text(path, files, field, documents.features)
    return documents


class DocumentStream:
    """Documents of a file or folder, in the order within each file.

    Args:
        path: As for `lightning_memo.data.document_files.read_documents`.
        suffix: As for `read_documents`.
        field: As for `read_documents`.
        seed: Seed of the order of the files.

    Raises:
        ValueError: There is no such file, it cannot be read, or its first record has no such field.
    """

    def __init__(self, path: str | None, suffix: str | None, field: str, seed: int) -> None:
        _check_installed()
        self.path, self.field = path, field
        self.kind, files = find_files(path, suffix)
        self.files = [files[n] for n in np.random.default_rng(seed).permutation(len(files))]
        self._checked: set[Path] = set()
        first = next(self.records(self.open()), None)
        if first is None:
            raise ValueError(f"path={path}: no documents in it; give a file or folder that has some")
        _check_field(path, field, first)

    def open(self) -> Any:
        """Returns the records as an `IterableDataset` of `datasets`, which reads the first file to find the fields."""
        self._check(0)
        with readable(lambda: self._where(0), self.kind):
            return _load_files(self.kind, self.files, streaming=True)

    def records(self, opened: Any) -> Iterator[dict[str, Any]]:
        """Yields the records of an opened stream.

        Raises:
            ValueError: A file cannot be read. The message is one line with the file and line number.
        """
        records = iter(opened)
        while True:
            self._check(_file(opened))
            with readable(lambda: self._where(_file(opened)), self.kind):
                record = next(records, None)
            if record is None:
                return
            yield record

    def _check(self, file: int) -> None:
        """Checks a file and the next two, if that has not been done: `datasets` reads one of them next."""
        for each in self.files[file : file + 3]:
            if each not in self._checked:
                _check_json(each)
                self._checked.add(each)

    def nearby(self, file: int) -> list[Path]:
        """Returns the file of a number and the next one, of which `datasets` is reading one."""
        return self.files[file : file + 2]

    def _where(self, file: int) -> str:
        return where_unreadable(self.path, self.nearby(file), self.field)


def _file(opened: Any) -> int:
    """Returns the number of the file that is being read, or of the one before."""
    state = opened.state_dict()
    while "examples_iterable" in state:
        state = state["examples_iterable"]
    return int(state["shard_idx"])


class DocumentReader:
    """Iterates over the texts of a stream, each with its number. Documents without text are skipped and not counted.

    Args:
        stream: Stream to read.
        place: Position of the first document; None for the beginning.
    """

    def __init__(self, stream: DocumentStream, place: Place | None = None) -> None:
        self._stream = stream
        self._number = 0
        self._records = stream.open()
        if place is not None:
            self._number = place["number"]
            self._records.load_state_dict(place["records"])
        self._texts = self._read()

    def place(self) -> Place:
        """Returns the position of the next document."""
        return {"number": self._number, "records": self._records.state_dict()}

    def __iter__(self) -> DocumentReader:
        return self

    def __next__(self) -> tuple[int, str]:
        """Returns the number and text of the next document.

        Raises:
            ValueError: A file cannot be read, or the field of a record is no text. The message is one line with the
                file and line number.
        """
        return next(self._texts)

    def _read(self) -> Iterator[tuple[int, str]]:
        for record in self._stream.records(self._records):
            text = record.get(self._stream.field)
            if text is not None and not isinstance(text, str):
                stream, kind = self._stream, type(text).__name__
                where = _where_no_text(stream.path, stream.nearby(_file(self._records)), stream.field)
                raise ValueError(
                    f"{where}: field={stream.field} holds {kind}, not text; give a field with text in all records"
                )
            if text and text.strip():
                self._number += 1
                yield self._number - 1, text


def _check_installed() -> None:
    """Checks that `datasets` is installed.

    Raises:
        ValueError: It is not installed.
    """
    if not _DATASETS:
        raise ValueError("DocumentsDataModule reads files with datasets; pip install 'lightning-memo[datasets]'")


def _load_files(kind: str, files: Sequence[Path], streaming: bool) -> Any:
    """Loads files of one format: a `Dataset`, or if `streaming`, an `IterableDataset` in the order of the files."""
    from datasets import config, disable_progress_bars, load_dataset  # takes seconds

    if not is_rank_zero():
        disable_progress_bars()
    options = {"sample_by": "document", "encoding_errors": "replace"} if kind == "text" else {}
    names = [str(file) for file in files]
    # The Hub's counter of downloads would be asked for every data set, and waited for where there is no network.
    counts, config.HF_UPDATE_DOWNLOAD_COUNTS = config.HF_UPDATE_DOWNLOAD_COUNTS, False
    try:
        return load_dataset(kind, data_files=names, split="train", streaming=streaming, **options)
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = counts


@contextmanager
def readable(where: Callable[[], str], kind: str) -> Iterator[None]:
    """Within this context, errors of `datasets` become one line with the files, their format and the reason.

    Args:
        where: Returns a description of the files.
        kind: Name of the format in `datasets`.

    Raises:
        ValueError: `datasets` cannot read the files.
    """
    import datasets  # takes seconds

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs the same error with row numbers of file chunks
    try:
        yield
    except StopIteration:
        raise ValueError(f"{where()}: no documents in it; give a file or folder that has some") from None
    except Exception as error:  # decompressors, Arrow and JSON each raise types of their own
        if _NOTHING in str(error):
            raise ValueError(f"{where()}: no documents in it; give a file or folder that has some") from error
        raise ValueError(
            f"{where()}: not readable as {kind}: {_reason(error)}; correct the file, or leave it out"
        ) from error
    finally:
        datasets.logging.set_verbosity(level)


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


def _check_field(path: str | None, field: str, names: Iterable[str]) -> None:
    """Checks that records have the field.

    Args:
        path: Path for the message.
        field: Name of the field.
        names: Names of all fields of the records.

    Raises:
        ValueError: The records have no such field.
    """
    if field not in names:
        known = sorted(names)
        remedy = f"give field={known[0]}" if len(known) == 1 else "give the one that holds the text"
        raise ValueError(f"field={field}: the documents of path={path} have {', '.join(known)}; {remedy}")


def _check_text(path: str | None, files: Sequence[Path], field: str, features: dict[str, Any]) -> None:
    kind = getattr(features[field], "dtype", None)
    if kind not in ("string", "large_string", "null"):
        where, names = _where_no_text(path, files, field), ", ".join(sorted(features))
        raise ValueError(
            f"{where}: field={field} holds {kind or 'several types'}, not text; give a field with text in all records, "
            f"which have {names}"
        )


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


def where_unreadable(path: str | None, files: Sequence[Path], field: str) -> str:
    """Returns the file and line that `datasets` cannot read: no JSON object, or another type than in other lines.

    Args:
        path: The user's path, which is returned if there is no such line.
        files: Files, of which only JSON lines are searched.
        field: Field of each record that holds the text.
    """
    return _where(files, lambda line: _object_in(line) is not None) or _where_no_text(path, files, field)


def _where_no_text(path: str | None, files: Sequence[Path], field: str) -> str:
    """Returns the first file and line whose field holds no text; see `where_unreadable`."""
    return _where(files, lambda line: _holds_text(line, field)) or f"path={path}"


def _where(files: Sequence[Path], is_right: Callable[[bytes], bool]) -> str:
    for file in files:
        if not _uncompressed(file).endswith(".jsonl"):
            continue
        number = 0
        try:
            with _opened(file) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip() and not is_right(line):
                        return f"path={file}, line {number}"
        except _READING_ERRORS:
            return f"path={file}, line {number + 1}"
    return ""


def _object_in(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()  # fails if a half of a surrogate pair is missing
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _holds_text(line: bytes, field: str) -> bool:
    record = _object_in(line)
    return record is None or isinstance(record.get(field), str | None)


def _reason(error: BaseException) -> str:
    """Returns the message of the innermost cause as a line, without the row, which counts within a part of a file."""
    cause = list(_causes(error))[-1]
    text = "".join(c if c.isprintable() else " " for c in str(cause))
    return re.sub(r" in row \d+$", "", one_line(text)).rstrip(".") or type(cause).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
