"""Uploads exported models to the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOG_IN = "run `hf auth login` with a token that may write, or set HF_TOKEN"


def create_repository(repository: str, private: bool | None = None) -> None:
    """Create a repository for a model on the Hub, unless it exists. Called before the work of an export.

    Args:
        repository: `ORGANISATION/NAME` or `USER/NAME`.
        private: Whether a new repository is private; None for the default of the organisation or user.

    Raises:
        ValueError: The name is wrong, the user is not logged in or may not write there, or the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, get_token  # not all runs upload

    with _in_one_line(repository):
        if get_token() is None:
            raise ValueError(f"push_to_hub={repository}: you are not logged in to the Hugging Face Hub: {_LOG_IN}")
        HfApi().create_repo(repository, private=private, exist_ok=True)


def upload_model(folder: str | Path, repository: str) -> str:
    """Upload the files of an exported model, and return the address of the repository.

    Args:
        folder: A folder that :func:`~lightning_memo.models.export_hugging_face.export_huggingface` wrote.
        repository: As for :func:`create_repository`, which has created it.

    Raises:
        ValueError: As for :func:`create_repository`.
    """
    from huggingface_hub import HfApi

    api = HfApi()
    with _in_one_line(repository):
        api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by lightning_memo")
    return f"{api.endpoint}/{repository}"


@contextmanager
def _in_one_line(repository: str) -> Iterator[None]:
    """Turn errors of the Hub, of which most have several lines, into ones that say what to do."""
    # HTTPError is httpx's in version 1 of huggingface_hub, and httpx2's in version 2.
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError  # type: ignore[attr-defined]

    given = f"push_to_hub={repository}"
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"{given}: no name of a repository: give ORGANISATION/NAME or USER/NAME") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status not in (401, 403):
            raise ValueError(f"{given}: the Hugging Face Hub answered with status {status}: try again later") from error
        what = "does not know your token" if status == 401 else "does not let you write there"
        raise ValueError(f"{given}: the Hugging Face Hub {what}: give another name, or {_LOG_IN}") from error
    except (HTTPError, ConnectionError) as error:  # the latter if HF_HUB_OFFLINE is set
        raise ValueError(
            f"{given}: the Hugging Face Hub cannot be reached ({type(error).__name__}): export without push_to_hub, "
            f"and later run `hf upload {repository} FOLDER`"
        ) from error
