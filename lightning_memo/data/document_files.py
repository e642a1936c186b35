"""Documents in files of this machine: JSON lines, Parquet, or one text file each, read by Hugging Face `datasets`."""

from __future__ import annotations

import gzip
import json
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
"""What `datasets` calls the format of files that end so; all other files are text."""
_NOTHING = "corresponds to no data"
"""What `datasets` says of files without records."""


def read_documents(path: str | None, suffix: str | None, field: str) -> Dataset:
    """The documents of a file or folder, memory-mapped from a copy in the cache of `datasets`.

    Args:
        path: A file, or a folder that is searched with all folders in it.
        suffix: Files whose name ends so; None is any that the formats have.
        field: Name of the documents' text in each record. A text file is one record, with the field `text`.

    Raises:
        ValueError: There is no such file, it can't be read, or its records have no such field of text.
    """
    check_installed()
    kind, files = find_files(path, suffix)
    with readable(lambda: _where(path, files, field), kind):
        documents: Dataset = load_files(kind, files, streaming=False)
    check_field(path, field, documents.features)
    _check_text(path, field, documents.features)
    return documents


def check_installed() -> None:
    """Refuses to go on without `datasets`.

    Raises:
        ValueError: It is not installed.
    """
    if not _DATASETS:
        raise ValueError("DocumentsDataModule reads files with datasets; pip install 'lightning-memo[datasets]'")


def load_files(kind: str, files: Sequence[Path], streaming: bool) -> Any:
    """What `datasets` makes of files of one format: a `Dataset`, or an `IterableDataset` in the order of the files."""
    from datasets import disable_progress_bars, load_dataset  # takes seconds

    if not is_rank_zero():
        disable_progress_bars()
    options = {"sample_by": "document", "encoding_errors": "replace"} if kind == "text" else {}
    names = [str(file) for file in files]
    return load_dataset(kind, data_files=names, split="train", streaming=streaming, **options)


@contextmanager
def readable(what: Callable[[], str], kind: str) -> Iterator[None]:
    """Inside, what `datasets` can't read is told in one line: what was to be read, as which format, and why it fails.

    Args:
        what: Tells which files.
        kind: What `datasets` calls the format.

    Raises:
        ValueError: It can't.
    """
    import datasets  # takes seconds
    from datasets.exceptions import DatasetGenerationError

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it tells the same, by the row of a part of a file
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
    """What `datasets` calls the format, and the files, sorted by path so that a seed means the same everywhere.

    Raises:
        ValueError: There is none, or there are several formats.
    """
    if path is None:
        raise ValueError("path: give the file or folder of your documents (JSON lines, Parquet or text)")
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
    """Refuses records without the field.

    Raises:
        ValueError: It is not among the names that they have.
    """
    if field not in names:
        known = sorted(names)
        remedy = f"give field={known[0]}" if len(known) == 1 else "give the one that holds the text"
        raise ValueError(f"field={field}: the documents of path={path} have {', '.join(known)}; {remedy}")


def _check_text(path: str | None, field: str, features: dict[str, Any]) -> None:
    kind = getattr(features[field], "dtype", None)
    if kind not in ("string", "large_string", "null"):
        raise ValueError(
            f"field={field}: it holds {kind or features[field]}, not text; the documents of path={path} have "
            f"{', '.join(sorted(features))}"
        )


def wrong_line(file: Path, field: str) -> int | None:
    """Number of the first line of a file of JSON lines that is no document."""
    if not file.name.endswith((".jsonl", ".jsonl.gz")):
        return None
    with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as lines:
        wrong = (number for number, line in enumerate(lines, 1) if line.strip() and not _is_document(line, field))
        return next(wrong, None)


def _is_document(line: bytes, field: str) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and isinstance(record.get(field), str | None)


def _where(path: str | None, files: Sequence[Path], field: str) -> str:
    """The file and line that is wrong, if there is one; else what the user gave."""
    found = ((file, line) for file in files if (line := wrong_line(file, field)) is not None)
    return next((f"path={file}, line {line}" for file, line in found), f"path={path}")


def _reason(error: BaseException) -> str:
    """What the innermost cause says, in one line."""
    chain = list(_causes(error))
    return " ".join(str(chain[-1]).split()) or type(chain[-1]).__name__


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
