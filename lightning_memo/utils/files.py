"""Atomic writes of files, and the cache folder for files that later runs reuse."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces ``path`` when the block ends without an exception.

    Args:
        path: The file to create or replace. Its folder is created if missing. If it is a link, its target is replaced.

    Raises:
        OSError: The file cannot be written, or ``path`` is a folder, a device or a pipe.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: exists and is not a regular file; choose another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{secrets.token_hex(4)}.{path.name}")  # libraries infer the format from the suffix
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Create a folder if missing, and check that files can be created in it.

    Args:
        folder: The folder.

    Raises:
        OSError: The folder or files in it cannot be created.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def user_cache(name: str) -> Path:
    """Folder for files that later runs reuse, in ``$XDG_CACHE_HOME`` or ``~/.cache``. It may not exist yet.

    Args:
        name: Name of the folder.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:  # containers may run under a user ID without a home folder
        cache = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return cache / "lightning_memo" / name
