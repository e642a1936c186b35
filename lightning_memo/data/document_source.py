"""Where records come from: files, or a data set of the Hugging Face Hub."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from lightning_utilities.core.imports import RequirementCache

from lightning_memo.data.documents import DocumentKind, WrongRecord
from lightning_memo.utils.process import is_rank_zero

if TYPE_CHECKING:
    from datasets import Dataset

_DATASETS = RequirementCache("datasets>=4")


class DocumentSource(ABC):
    """Records that Hugging Face `datasets` reads, at once or as a stream.

    Args:
        path: The user's path, for messages.

    Raises:
        ValueError: `datasets` is not installed.
    """

    def __init__(self, path: str | None) -> None:
        if not _DATASETS:
            raise ValueError("DocumentsDataModule reads files with datasets; pip install 'lightning-memo[datasets]'")
        self.path = path

    @abstractmethod
    def load(self) -> Dataset:
        """Returns all records, memory-mapped from a copy in the cache of `datasets`.

        Raises:
            ValueError: The records cannot be read. The message is one line.
        """

    @abstractmethod
    def stream(self) -> Any:
        """Returns the records as an `IterableDataset` of `datasets`.

        Raises:
            ValueError: As for `load`.
        """

    @abstractmethod
    def reading(self, near: int | None = None) -> AbstractContextManager[None]:
        """Within this context, errors of `datasets` become one line with the place and the reason.

        Args:
            near: Number of the part that is being read, or of the one before; None if any part may be.

        Raises:
            ValueError: `datasets` cannot read the records, or would not survive those of a part.
        """

    def part_of(self, opened: Any) -> int | None:
        """Returns the number of the part that an opened stream reads, or of the one before; None if it is unknown."""
        return None

    def place_of_wrong(self, kind: DocumentKind, near: int | None) -> str:
        """Returns the place of the first record that is no document of a kind, as precisely as it is known."""
        return f"path={self.path}"

    @contextmanager
    def naming(self, kind: DocumentKind, near: int | None = None) -> Iterator[None]:
        """Within this context, wrong records become one line with the place and the reason.

        Args:
            kind: Kind of the documents that are encoded within the context.
            near: As for `reading`.

        Raises:
            ValueError: A record is no document.
        """
        try:
            yield
        except WrongRecord as error:
            raise ValueError(f"{self.place_of_wrong(kind, near)}: {error}") from None


def load_records(*names: str, **settings: Any) -> Any:
    """Calls `datasets.load_dataset`, with a progress bar in the first process only."""
    from datasets import config, disable_progress_bars, load_dataset  # takes seconds

    if not is_rank_zero():
        disable_progress_bars()
    # The Hub's counter of downloads would be asked for every data set, and waited for where there is no network.
    counts, config.HF_UPDATE_DOWNLOAD_COUNTS = config.HF_UPDATE_DOWNLOAD_COUNTS, False
    try:
        return load_dataset(*names, **settings)
    finally:
        config.HF_UPDATE_DOWNLOAD_COUNTS = counts
