"""Documents in local JSON lines, Parquet or text files, read by Hugging Face `datasets`."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.imports import RequirementCache

from lightning_memo.utils.process_rank import is_rank_zero

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
_NOTHING = "corresponds to no data"
"""Part of the error message of `datasets` for files without records."""


def read_documents(path: str | None, suffix: str | None, field: str) -> Dataset:
    """Returns the documents of a file or folder, memory-mapped from a copy in the cache of `datasets`.

    Args:
        path: File, or folder that is searched recursively.
        suffix: Ending of the file names to read; None for all known endings.
        field: Field of each record that holds the text. A text file is one record with the field `text`.

    Raises:
        ValueError: There is no such file, it cannot be read, or its records have no such text field.
    """
    check_installed()
    kind, files = find_files(path, suffix)
    with readable(lambda: where_unreadable(path, files, field), kind):
        documents: Dataset = load_files(kind, files, streaming=False)
    check_field(path, field, documents.features)
    _check_text(path, files, field, documents.features)
    return documents


def check_installed() -> None:
    """Checks that `datasets` is installed.

    Raises:
        ValueError: It is not installed.
    """
    if not _DATASETS:
        raise ValueError("DocumentsDataModule reads files with datasets; pip install 'lightning-memo[datasets]'")


def load_files(kind: str, files: Sequence[Path], streaming: bool) -> Any:
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
def readable(what: Callable[[], str], kind: str) -> Iterator[None]:
    """Within this context, errors of `datasets` become one line with the files, their format and the reason.

    Args:
        what: Returns a description of the files.
        kind: Name of the format in `datasets`.

    Raises:
        ValueError: `datasets` cannot read the files.
    """
    import datasets  # takes seconds
    from datasets.exceptions import DatasetGenerationError

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs the same error with row numbers of file chunks
    try:
        yield
    except StopIteration:
        raise ValueError(f"{what()}: no documents in it; give a file or folder that has some") from None
    except (DatasetGenerationError, OSError, ValueError) as error:
        if _NOTHING in str(error):
            raise ValueError(f"{what()}: no documents in it; give a file or folder that has some") from error
        raise ValueError(f"{what()}: not readable as {kind}: {_reason(error)}") from error
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


def _format(file: Path) -> str:
    return next((kind for ending, kind in _FORMATS.items() if file.name.endswith(ending)), "text")


def check_field(path: str | None, field: str, names: Iterable[str]) -> None:
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
        where, names = where_no_text(path, files, field), ", ".join(sorted(features))
        raise ValueError(
            f"{where}: field={field} holds {kind or 'several types'}, not text; give a field with text in all records, "
            f"which have {names}"
        )


def where_unreadable(path: str | None, files: Sequence[Path], field: str) -> str:
    """Returns the file and line that `datasets` cannot read: no JSON object, or another type than in other lines.

    Args:
        path: The user's path, which is returned if there is no such line.
        files: Files, of which only JSON lines are searched.
        field: Field of each record that holds the text.
    """
    return _where(files, lambda line: _object_in(line) is not None) or where_no_text(path, files, field)


def where_no_text(path: str | None, files: Sequence[Path], field: str) -> str:
    """Returns the first file and line whose field holds no text; see `where_unreadable`."""
    return _where(files, lambda line: _holds_text(line, field)) or f"path={path}"


def _where(files: Sequence[Path], is_right: Callable[[bytes], bool]) -> str:
    for file in files:
        if not file.name.endswith((".jsonl", ".jsonl.gz")):
            continue
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip() and not is_right(line):
                    return f"path={file}, line {number}"
    return ""


def _object_in(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _holds_text(line: bytes, field: str) -> bool:
    record = _object_in(line)
    return record is None or isinstance(record.get(field), str | None)


def _reason(error: BaseException) -> str:
    """Returns the message of the innermost cause as a line, without the row, which counts within a part of a file."""
    chain = list(_causes(error))
    return re.sub(r" in row \d+$", "", " ".join(str(chain[-1]).split())) or type(chain[-1]).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
