"""Atomic writes of files and folders, and the cache folder for files that later runs reuse.

A new file or folder is written to a folder `.unfinished` beside its target, flushed to the disk, and renamed. Readers
see the old one or the new one, even after a kill, a full disk or a power failure. Both are on one file system, so a
rename is atomic. A folder cannot replace another one by a single rename: the old `last.ckpt` is `last.previous.ckpt`
until the new one is in place. Lightning also reads this name as a "last" checkpoint, so `ckpt_path="last"` finds it.

A writer holds a shared lock of the folder that its target is in. Who gets an exclusive one knows that nobody is
writing, and that what is unfinished was left by a killed process.
"""

import errno
import fcntl
import functools
import io
import os
import re
import secrets
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_UNFINISHED: Final = ".unfinished"
_BUFFER_BYTES: Final = 2**20
_ONLY_WRITES: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_REMEDIES: Final = {
    errno.ENOSPC: "free space there, or give a folder on another disk",
    errno.EDQUOT: "free space of the quota there, or give a folder on another disk",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f), or give a folder on another disk",
    errno.EROFS: "give a folder on a disk that is not mounted read-only",
    errno.EACCES: "give a folder that can be written to",
    errno.EPERM: "give a folder that can be written to",
    errno.ENOTDIR: "give a folder that can be written to",
    errno.EEXIST: "give a folder that can be written to",
    errno.ENAMETOOLONG: "give a shorter name",
}


class WriteError(OSError):
    """A file cannot be written. The message is one line: the file, the reason, and the remedy."""

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number

    @classmethod
    def of(cls, path: Path, error: OSError) -> "WriteError":
        """Describes the failure of a write to a file, or to one in a folder."""
        reason = error.strerror or str(error)
        remedy = _REMEDIES.get(error.errno or 0, "check the disk, or give a folder on another one")
        return cls(f"{path} cannot be written ({reason}): {remedy}", error.errno)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, which replaces ``path`` when the block ends without an exception.

    Args:
        path: The file to create or replace. Its folder is created if missing. If it is a link, its target is replaced.

    Raises:
        WriteError: The file cannot be written.
        OSError: ``path`` is a folder, a device or a pipe.
    """
    target = path.resolve()
    if _is_special(target):
        raise OSError(f"{path}: exists and is not a regular file; choose another name")
    with unfinished(target) as written:
        yield written
        commit(written, target)


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """Yield a temporary path for a new file or folder. What is still there at the end is removed.

    Also removes what killed processes left beside the target.

    Args:
        target: Absolute path of the file or folder to create or replace. Missing parents are created.

    Raises:
        WriteError: The block cannot write.
    """
    own = target.parent / _UNFINISHED / secrets.token_hex(4)
    with explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target.parent)
        try:
            with _locked(target.parent, fcntl.LOCK_SH):
                try:
                    own.mkdir(parents=True)
                    yield own / target.name  # libraries infer the format from the suffix
                finally:
                    shutil.rmtree(own, ignore_errors=True)
        finally:
            _sweep(target.parent)


@contextmanager
def explained(target: Path) -> Iterator[None]:
    """Explain errors of writes to a path from :func:`unfinished`, or to files in a folder.

    Raises:
        WriteError: The block cannot write.
    """
    try:
        yield
    except Exception as error:
        failure = _failed_write(error, target)
        if failure is None:
            raise
        raise WriteError.of(_failed_path(failure, target), failure) from error


def commit(written: Path, target: Path) -> None:
    """Replace ``target``, a file, folder or link or nothing, by a file or folder that is finished.

    A link itself is replaced, not the file or folder it points to.

    Args:
        written: Path from :func:`unfinished`.
        target: The same path as for :func:`unfinished`.
    """
    _sync(written)
    previous = None
    if _blocks(target, written):
        previous = previous_of(target)
        remove(previous)
        target.rename(previous)
    written.replace(target)
    _sync_one(target.parent)
    if previous is not None:
        remove(previous)


def remove(target: Path) -> None:
    """Remove a file, link or folder atomically. Does nothing if it does not exist."""
    if _is_folder(target):
        with unfinished(target) as doomed:
            target.rename(doomed)
    else:
        target.unlink(missing_ok=True)


def find_complete(target: Path) -> Path | None:
    """Returns `target`, or its predecessor if a killed process left only that one; None if neither exists."""
    # The predecessor is removed after the new target is in place, so check the target twice.
    candidates = (target, previous_of(target), target)
    return next((path for path in candidates if path.exists()), None)


def previous_of(target: Path) -> Path:
    """Returns the temporary name of the old target while it is replaced."""
    return target.with_name(f"{target.stem}.previous{target.suffix}")


class OutputFile(io.BufferedWriter):
    """A new binary file, which is flushed to the disk when it is closed.

    If a write in a `with` block fails, the block raises its error, which libraries hide behind errors of their own.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"), _BUFFER_BYTES)
        self._failure: OSError | None = None

    def write(self, data: "bytes | memoryview") -> int:  # type: ignore[override]
        try:
            return super().write(data)
        except OSError as error:
            self._failure = self._failure or error
            raise

    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()

    def __exit__(self, *error: object) -> None:
        try:
            self.close()
        finally:
            if self._failure is not None:
                raise self._failure


def _failed_write(error: Exception, target: Path) -> OSError | None:
    """The error of the system if it is certainly one of a write, or is about the target, otherwise `None`."""
    if not isinstance(error, OSError):  # libraries in Rust, such as safetensors, have errors of their own
        number = re.search(r"\(os error (\d+)\)", str(error))
        return OSError(int(number[1]), os.strerror(int(number[1]))) if number else None
    if isinstance(error, WriteError) or error.errno is None:
        return None
    is_write = error.filename is None or error.errno in _ONLY_WRITES
    return error if is_write or _failed_path(error, target) == target else None


def _failed_path(error: OSError, target: Path) -> Path:
    """The target if an error is about it, its folder or its temporary file. Errors of open files do not name them."""
    if error.filename is None:
        return target
    failed = Path(os.fsdecode(error.filename))
    about = failed.is_relative_to(target.parent / _UNFINISHED) or target.is_relative_to(failed)
    return target if about else failed


def _is_special(path: Path) -> bool:
    try:
        return not stat.S_ISREG(path.stat().st_mode)
    except OSError:  # it does not exist, or the write will say why it cannot be read
        return False


def _blocks(target: Path, written: Path) -> bool:
    """Whether a rename cannot replace what is at the target."""
    if not written.is_dir():
        return _is_folder(target)
    return os.path.lexists(target) and not (_is_folder(target) and not any(target.iterdir()))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[bool]:
    """Hold a lock of a folder; yields whether it was free."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            yield False
            return
        except OSError:  # a file system without locks: then this process is taken for the only one that writes there
            yield True
            return
        try:
            yield True
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may have the descriptor, too
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove what is unfinished in a folder, unless somebody is writing it."""
    if os.path.lexists(folder / _UNFINISHED):
        with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB) as nobody_writes:
            if nobody_writes:
                shutil.rmtree(folder / _UNFINISHED, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush a file, or a folder and its contents. Otherwise a power failure could keep a rename but lose files."""
    for inside in path.rglob("*") if path.is_dir() else ():
        _sync_one(inside)
    _sync_one(path)


def _sync_one(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    """Folder for files that later runs reuse, in ``$XDG_CACHE_HOME`` or ``~/.cache``. It may not exist.

    Compiled code is loaded from it. Only this user and root may therefore be able to write to it: if it belongs to
    somebody else, a temporary folder of this process takes its place. If it is this user's, but others could write to
    it, it is deleted and made again.

    Args:
        name: Name of the folder.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        cache = Path(root) if root else Path.home() / ".cache"
        own = [cache / "lightning_memo", cache / "lightning_memo" / name]
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    except RuntimeError:  # containers may run under a user ID without a home folder
        cache = Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"
        own = [cache, cache / "lightning_memo", cache / "lightning_memo" / name]
    except OSError:
        return own[-1]  # who writes to it says that it cannot be written
    try:
        for folder in own:
            _make_private(folder)
    except _ForeignFolder as error:
        _warn_once(str(error))
        return Path(_temporary_cache().name) / name
    except OSError:
        pass
    return own[-1]


class _ForeignFolder(Exception):
    """A folder of the cache, or the link to it, belongs to somebody else."""


def _make_private(folder: Path) -> None:
    """Make a folder to which only this user can write. Its parent exists.

    Raises:
        _ForeignFolder: It exists, and is not this user's or root's.
        OSError: It cannot be made.
    """
    while True:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        link, found = folder.lstat(), folder.stat()
        writable = bool(found.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
        mine = found.st_uid == os.getuid()
        if not {link.st_uid, found.st_uid} <= {0, os.getuid()} or (writable and not mine):
            raise _ForeignFolder(
                f"{folder}: other users can write to this folder, and code is loaded from it: a temporary folder is "
                "used instead, and each run compiles again; set XDG_CACHE_HOME to a folder of your own"
            )
        if not writable:
            return
        _warn_once(f"{folder}: other users could write to this folder, and code is loaded from it: it is made again")
        # Renamed first: no other process of this user may find the files before all of them are deleted.
        discarded = folder.with_name(f".{secrets.token_hex(4)}.{folder.name}")
        folder.rename(discarded)
        if discarded.is_symlink():
            discarded.unlink()
        else:
            shutil.rmtree(discarded, ignore_errors=True)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


@functools.cache
def _temporary_cache() -> tempfile.TemporaryDirectory[str]:
    """A folder of mode 0700, which is deleted when the process ends."""
    return tempfile.TemporaryDirectory(prefix="lightning_memo-")
