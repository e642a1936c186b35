"""Writing files that are never seen half done, and where files are kept between runs."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to; when the block ends well, that file takes the place of ``path``.

    Args:
        path: The file to be; its folder is made if missing. Where it is a link, what it points to is replaced.

    Raises:
        OSError: It can't be written, or it exists and is a folder, a device or a pipe.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(f"{path}: exists and is no regular file; give another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{secrets.token_hex(4)}.{path.name}")  # the suffix tells libraries the format
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Makes the folder if it is missing, and looks whether files can be made in it.

    Raises:
        OSError: They can't.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()


def user_cache(name: str) -> Path:
    """A folder for what later runs can use again: in ``$XDG_CACHE_HOME``, else ``~/.cache``.

    Args:
        name: Of the folder, which need not exist.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(root) if root else Path.home() / ".cache"
    except RuntimeError:  # containers run under numbers that have no home
        cache = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
    return cache / "lightning_memo" / name
