"""Documents of a data set of the Hugging Face Hub, which `datasets` downloads or streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_memo.data.document_source import DocumentSource, load_records
from lightning_memo.data.documents import WrongRecord
from lightning_memo.utils.user_errors import one_line

if TYPE_CHECKING:
    from datasets import Dataset


class HubDocuments(DocumentSource):
    """Records of a data set of the Hub.

    Args:
        name: Id of the data set, like "HuggingFaceH4/ultrachat_200k".
        subset: Name of one of its configurations; None for the only one, or the default.
        split: Name of the split.

    Raises:
        ValueError: `datasets` is not installed, the Hub has no such data set or does not give it, or it cannot be
            reached.
    """

    def __init__(self, name: str, subset: str | None, split: str) -> None:
        super().__init__(name)
        self._name, self._subset, self._split = name, subset, split
        self._check_access()

    @override
    def load(self) -> Dataset:
        return self._load(streaming=False)

    @override
    def stream(self) -> Any:
        return self._load(streaming=True)

    def _load(self, streaming: bool) -> Any:
        with self.reading():
            return load_records(self._name, *filter(None, [self._subset]), split=self._split, streaming=streaming)

    @override
    @contextmanager
    def reading(self, near: int | None = None) -> Iterator[None]:
        try:
            yield
        except (WrongRecord, StopIteration):
            raise
        except ValueError as error:  # an unknown subset or split, whose names the message lists
            reason = one_line(str(error)).rstrip(".")
            raise ValueError(f"path={self.path}: {reason}; choose by subset and split, or give another path") from error
        except Exception as error:  # of networks, formats and Arrow
            reason = one_line(str(error)).rstrip(".") or type(error).__name__
            raise ValueError(f"path={self.path}: not readable: {reason}; try again, or give files") from error

    def _check_access(self) -> None:
        """Asks the Hub for the data set once, where `datasets` would try for half a minute."""
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError

        folder = self._name.rpartition("/")[2]
        try:
            HfApi().dataset_info(self._name, timeout=10)
        except OfflineModeIsEnabled:
            return  # the user's wish; what was downloaded before is read
        except GatedRepoError:
            reason = f"its terms have to be accepted at https://huggingface.co/datasets/{self.path}, by the user of"
            raise ValueError(f"path={self.path}: {reason} `hf auth login`") from None
        except RepositoryNotFoundError:
            raise ValueError(
                f"path={self.path}: no such file or folder, and the Hub has no such data set, or it is private and"
                " needs `hf auth login`; give a file, a folder or a data set"
            ) from None
        except Exception as error:  # of the HTTP client that huggingface_hub uses
            raise ValueError(
                f"path={self.path}: no such file or folder, and the Hub cannot be reached ({one_line(str(error))}): set"
                f" HF_HUB_OFFLINE=1 to read what was downloaded before, or run `hf download {self.path} --repo-type"
                f" dataset --local-dir {folder}` where that is possible, and give path={folder}"
            ) from None
