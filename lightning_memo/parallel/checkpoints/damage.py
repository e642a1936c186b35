"""Finds damaged checkpoints before anything of them is used.

A file of `torch.save` is a ZIP archive with a CRC-32 of each record, which `torch.load` does not compare. The last file
that is written to a checkpoint folder has the CRC-32 of all others. Several processes divide the work among them.

CRC-32 is the fastest of the standard library (1 to 7 GB/s on a core, SHA-256 and BLAKE2 1 to 2 GB/s). It finds errors
of up to 32 neighbouring bits, and misses others once in 2^32. Other digests would protect no better against people, who
can change the digest, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Final, NoReturn, TypeVar

from lightning_memo.parallel.ranks import rank_and_size
from lightning_memo.utils.files import OutputFile

_READ_BYTES: Final = 2**22
_MOST_THREADS: Final = 8
_ZIP_START: Final = b"PK\x03\x04"
_DIRECTORY: Final = 0x10  # among the attributes of a record
CHECKSUMS_FILE: Final = "checksums.json"

T = TypeVar("T")


class _DamagedFile(ValueError):
    """A file is not as it was written. The message has its name."""


# What zipfile raises when it opens a damaged archive, or reads a record of one.
_ARCHIVE_ERRORS: Final = (
    zipfile.BadZipFile, ValueError, EOFError, OverflowError, RuntimeError, OSError, zlib.error, struct.error,
)  # fmt: skip


class DamagedCheckpoint(ValueError):
    """A checkpoint is not as it was written. The message is one line: the file, what is wrong, and what to do."""


class ChecksummedFile(OutputFile):
    """A new binary file whose CRC-32 is computed while it is written from its start to its end."""

    checksum = 0

    def write(self, data: bytes | memoryview) -> int:  # type: ignore[override]
        self.checksum = zlib.crc32(data, self.checksum)
        return super().write(data)


@contextlib.contextmanager
def reading_archive(path: Path) -> Iterator[None]:
    """Compare the records of a file of `torch.save` with their CRC-32, before the block reads it.

    Raises:
        DamagedCheckpoint: The file is damaged or incomplete. Errors of the block in reading an undamaged file pass.
    """
    undamaged = _check_archive(path)
    try:
        yield
    except Exception as error:  # what is damaged can raise anything
        if undamaged and "PytorchStreamReader" not in str(error):  # which is strict with the directory of the archive
            raise
        refuse(path, f"it cannot be read ({reason_of(error)})", error, "no checkpoint, or a damaged one")


def check_folder(folder: Path) -> None:
    """Compare the files of a checkpoint folder with their CRC-32. Old folders, and Lightning's, have none.

    Raises:
        DamagedCheckpoint: A file is damaged or missing.
    """
    path = folder / CHECKSUMS_FILE
    if not path.is_file():
        return
    try:
        checksums: dict[str, int] = json.loads(path.read_bytes())
        names = _own_part(sorted(checksums), lambda name: name.endswith(".distcp"))
        checks = [partial(_check_file, folder / Path(name).name, int(checksums[name])) for name in names]
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        refuse(folder, f"{CHECKSUMS_FILE} is damaged", error)
    _together(folder, checks)


def write_checksums(folder: Path, checksums: Mapping[str, int]) -> None:
    """Write the last file of a checkpoint folder.

    Args:
        folder: The folder.
        checksums: CRC-32 of each file by its name.
    """
    with OutputFile(folder / CHECKSUMS_FILE) as file:
        file.write(json.dumps(checksums, indent=1).encode())


def refuse(
    path: Path, reason: str, cause: BaseException | None = None, verdict: str = "damaged or incomplete checkpoint"
) -> NoReturn:
    """Refuse a checkpoint, and name another one to take.

    Args:
        path: File or folder of the checkpoint.
        reason: What is wrong with it.
        cause: The error that showed it.
        verdict: What the path is.

    Raises:
        DamagedCheckpoint: Always.
    """
    other = _newest_other(path)
    if other is None:
        instead = f"no other checkpoint is in {path.parent}: take a copy of it, or train from the start"
    else:
        instead = f"resume from {other}, the newest undamaged one beside it"
    raise DamagedCheckpoint(f"{path}: {verdict}: {reason}; {instead}") from cause


def reason_of(error: BaseException) -> str:
    """The first line of an error, with the class of one that is no text for users."""
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[0] if isinstance(error, (zipfile.BadZipFile, _DamagedFile)) else f"{type(error).__name__}: {lines[0]}"


def _check_archive(path: Path) -> bool:
    """Check a file, and return whether it is known to be undamaged: one that is no archive has no checksums."""
    with path.open("rb") as file:
        begins = file.read(len(_ZIP_START)) == _ZIP_START
    try:
        archive = zipfile.ZipFile(path)
    except _ARCHIVE_ERRORS as error:
        if begins:
            refuse(path, f"it has {path.stat().st_size} bytes, and its end is missing or damaged", error)
        return False
    with archive:
        if not begins:
            refuse(path, "its first bytes are damaged")
        records = archive.infolist()
        if not any(record.CRC for record in records):  # `torch.serialization.set_crc32_options` can leave them out
            return False
        own = _own_part(records, lambda record: "/data/" in record.filename)
        _together(path, [partial(_check_record, archive, record) for record in own])
    return True


def _own_part(items: Sequence[T], is_data: Callable[[T], bool]) -> list[T]:
    """The items that this process checks: its part of the data, and all of the others, which every process reads."""
    rank, size = rank_and_size()
    return [*(item for item in items if not is_data(item)), *[item for item in items if is_data(item)][rank::size]]


def _newest_other(path: Path) -> Path | None:
    """The newest file or folder beside a checkpoint that is an undamaged one of its kind of name."""
    beside = [other for other in path.parent.glob(f"*{path.suffix}") if other.resolve() != path.resolve()]
    dated = [(other.stat().st_mtime, other) for other in beside if other.exists()]
    return next((other for _, other in sorted(dated, reverse=True) if _is_undamaged(other)), None)


def _is_undamaged(path: Path) -> bool:
    if path.is_dir():
        return (path / ".metadata").is_file()
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                _check_record(archive, record)
    except _ARCHIVE_ERRORS:
        return False
    return True


def _together(path: Path, checks: Iterable[Callable[[], None]]) -> None:
    """Run checks in threads; reading and CRC-32 release the interpreter lock."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "checkpoint") as threads:
        for done in [threads.submit(check) for check in checks]:
            try:
                done.result()
            except _ARCHIVE_ERRORS as error:
                threads.shutdown(cancel_futures=True)
                refuse(path, reason_of(error), error)


def _check_record(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> None:
    """Read a record of an archive to its end, where zipfile compares the CRC-32.

    `torch.load` does not read a record that is marked as a directory: it returns memory that nothing has written.
    """
    if record.external_attr & _DIRECTORY:
        raise _DamagedFile(f"{record.filename} is marked as a directory")
    with archive.open(record) as file:
        while file.read(_READ_BYTES):
            pass


def _check_file(path: Path, checksum: int) -> None:
    if not path.is_file():
        raise _DamagedFile(f"{path.name} is missing")
    found = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            found = zlib.crc32(block, found)
    if found != checksum:
        raise _DamagedFile(f"{path.name} has other bytes than those that were written")
