"""Documents that are read from files one after the other during training, from any position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lightning_memo.data.document_files import (
    check_field,
    check_installed,
    find_files,
    load_files,
    readable,
    where_no_text,
    where_unreadable,
)

Place = Mapping[str, Any]
"""Position in a stream at which reading continues; plain data."""


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
        check_installed()
        self.path, self.field = path, field
        self.kind, files = find_files(path, suffix)
        self.files = [files[n] for n in np.random.default_rng(seed).permutation(len(files))]
        first = next(self.records(self.open()), None)
        if first is None:
            raise ValueError(f"path={path}: no documents in it; give a file or folder that has some")
        check_field(path, field, first)

    def open(self) -> Any:
        """Returns the records as an `IterableDataset` of `datasets`, which reads the first file to find the fields."""
        with readable(lambda: self._where(0), self.kind):
            return load_files(self.kind, self.files, streaming=True)

    def records(self, opened: Any) -> Iterator[dict[str, Any]]:
        """Yields the records of an opened stream.

        Raises:
            ValueError: A file cannot be read. The message is one line with the file and line number.
        """
        records = iter(opened)
        while True:
            with readable(lambda: self._where(_file(opened)), self.kind):
                record = next(records, None)
            if record is None:
                return
            yield record

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
                where = where_no_text(stream.path, stream.nearby(_file(self._records)), stream.field)
                raise ValueError(f"{where}: field={stream.field} holds {kind}, not text")
            if text and text.strip():
                self._number += 1
                yield self._number - 1, text
