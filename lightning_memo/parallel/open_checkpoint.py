"""Opens checkpoints without running code from them: a sharded folder of many processes, or a file of one process.

Both are tables that map a path of keys, like `("optimizer_0", "state", "model.norm.weight", "exp_avg")`, to tensors,
which are read in parts, and to other values. torch's load planner decides which parts a sharded tensor needs.

PyTorch's reader of folders unpickles `.metadata`, and its planner the entries that are no tensors. Unpickling calls
functions that the pickle names, so that a file of a stranger could run any code.

Note: [Damaged checkpoints]
Damage is found before anything of a checkpoint is used. A file of `torch.save` is a ZIP archive with a CRC-32 of each
record, which `torch.load` does not compare. The last file that is written to a checkpoint folder has the CRC-32 of all
others. Several processes divide the work among them.

CRC-32 is the fastest of the standard library (1 to 7 GB/s on a core, SHA-256 and BLAKE2 1 to 2 GB/s). It finds errors
of up to 32 neighbouring bits, and misses others once in 2^32. Other digests would protect no better against people, who
can change the digest, too.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future
from torch.serialization import _get_layout
from typing_extensions import override

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
        _refuse(path, f"it cannot be read ({_reason_of(error)})", error, "no checkpoint, or a damaged one")


def _check_folder(folder: Path) -> None:
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
        _refuse(folder, f"{CHECKSUMS_FILE} is damaged", error)
    _together(folder, checks)


def write_checksums(folder: Path, checksums: Mapping[str, int]) -> None:
    """Write the last file of a checkpoint folder.

    Args:
        folder: The folder.
        checksums: CRC-32 of each file by its name.
    """
    with OutputFile(folder / CHECKSUMS_FILE) as file:
        file.write(json.dumps(checksums, indent=1).encode())


def _refuse(
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


def _reason_of(error: BaseException) -> str:
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
            _refuse(path, f"it has {path.stat().st_size} bytes, and its end is missing or damaged", error)
        return False
    with archive:
        if not begins:
            _refuse(path, "its first bytes are damaged")
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
                _refuse(path, _reason_of(error), error)


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


REST_FILE = "meta.pt"
"""File of a checkpoint folder with everything but weights and optimizer state. Lightning uses the same name."""

METADATA_FILE = ".metadata"
KeyPath = tuple[Any, ...]


@dataclass(frozen=True)
class CheckpointSource:
    """An opened checkpoint.

    Attributes:
        path: Folder or file of the checkpoint.
        rest: Entries that are neither weights nor optimizer state.
        metadata: Sizes and types of the entries.
        reader: Reads the entries.
        weights_only: As for `torch.load`, for entries that are no tensors.
    """

    path: Path
    rest: dict[str, Any]
    metadata: Metadata
    reader: dcp.StorageReader
    weights_only: bool | None

    def entries(self, *prefix: Any) -> dict[KeyPath, TensorStorageMetadata | BytesStorageMetadata]:
        """Returns the metadata of all entries whose path starts with `prefix`."""
        paths, table = self.metadata.planner_data, self.metadata.state_dict_metadata
        return {path: table[key] for key, path in paths.items() if path[: len(prefix)] == prefix}

    def read(self, destinations: Mapping[KeyPath, Any]) -> dict[KeyPath, Any]:
        """Reads entries in this process, without communication.

        Args:
            destinations: Tensors to read into by path: plain tensors, or DTensors whose local part is read. None
                creates a new tensor in host memory, or reads a value that is no tensor.

        Returns:
            The values by path.

        Raises:
            ValueError: The files are damaged, or an entry that is no tensor holds more than `weights_only` reads.
        """
        keys = {path: key for key, path in self.metadata.planner_data.items()}
        flat = {keys[path]: self._destination(keys[path], value) for path, value in destinations.items()}
        planner = _EntryPlanner(self.weights_only)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # reading alone is intended
            try:
                dcp.load(flat, storage_reader=self.reader, planner=planner, no_dist=True)
            except dcp.CheckpointException as error:
                cause, _ = error.failures[0]
                if isinstance(cause, pickle.UnpicklingError):
                    raise _refusal(self.path, self.weights_only, cause) from cause
                _refuse(self.path, _reason_of(cause), cause, verdict="cannot be read")
        return {path: flat[keys[path]] for path in destinations}

    def _destination(self, key: str, value: Any) -> Any:
        entry = self.metadata.state_dict_metadata[key]
        if value is None and isinstance(entry, TensorStorageMetadata):
            return torch.empty(entry.size, dtype=entry.properties.dtype)
        return value


def open_checkpoint(path: Path, weights_only: bool | None = None) -> CheckpointSource:
    """Opens a folder or file, without running code from it unless `weights_only` is False.

    Args:
        path: A folder that :func:`~lightning_memo.parallel.sharded_checkpoint.save_sharded` or Lightning's
            `ModelParallelStrategy` wrote, or a file that `Trainer.save_checkpoint` wrote in one process.
        weights_only: As for `torch.load`, for a file, and for metadata and entries of a folder that are no tensors.

    Raises:
        ValueError: The path is no checkpoint or an incomplete one, or it holds more than `weights_only` reads.
    """
    if path.is_file():
        return whole_checkpoint(path, _load_file(path, weights_only, mmap=True))
    _check_folder(path)
    if not (path / REST_FILE).is_file() or not (path / METADATA_FILE).is_file():
        _refuse(path, f"it needs {REST_FILE} and {METADATA_FILE}", verdict="incomplete checkpoint, or none")
    files = FolderReader(path, weights_only)
    metadata = files.read_metadata()
    reason = missing_part(path, metadata)
    if reason is not None:
        _refuse(path, reason)
    return CheckpointSource(path, _load_file(path / REST_FILE, weights_only), metadata, files, weights_only)


def whole_checkpoint(path: Path, checkpoint: Any) -> CheckpointSource:
    """Makes a loaded checkpoint of one process a source.

    Args:
        path: Where it was loaded from.
        checkpoint: What was loaded. Weights and optimizer states are moved out of it.

    Raises:
        ValueError: It is no checkpoint.
    """
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError(f"{path}: no checkpoint: a file that Trainer.save_checkpoint wrote holds a state_dict")
    reader = _TableReader(dict(_table(checkpoint)))
    return CheckpointSource(path, checkpoint, reader.read_metadata(), reader, weights_only=False)  # loaded already


def missing_part(folder: Path, metadata: Metadata) -> str | None:
    """Returns which file of a folder is missing or too short, and None if all have their full size."""
    sizes: dict[str, int] = {}
    for part in metadata.storage_data.values():
        sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
    for name, size_bytes in sizes.items():
        file = folder / name
        found_bytes = file.stat().st_size if file.is_file() else None
        if found_bytes is None:
            return f"{name} is missing"
        if found_bytes < size_bytes:
            return f"{name} has {found_bytes} of {size_bytes} bytes"
    return None


def _load_file(path: Path, weights_only: bool | None, mmap: bool = False) -> Any:
    try:
        with reading_archive(path):
            return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise _refusal(path, weights_only, error) from error


def _table(checkpoint: dict[str, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """Moves weights and optimizer states out of a single-process checkpoint, yielding the paths of a folder."""
    for name, value in checkpoint.pop("state_dict").items():
        yield ("state_dict", name), value
    for index, optimizer in enumerate(checkpoint.pop("optimizer_states", [])):
        root = f"optimizer_{index}"
        for parameter, state in optimizer["state"].items():
            yield from (((root, "state", parameter, key), value) for key, value in state.items())
        for position, group in enumerate(optimizer["param_groups"]):
            yield from (((root, "param_groups", position, key), value) for key, value in group.items())


def _describe(table: Mapping[KeyPath, Any]) -> Metadata:
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for path, value in table.items():
        if isinstance(value, Tensor):
            whole = ChunkStorageMetadata(torch.Size([0] * value.ndim), value.size())
            entry = TensorStorageMetadata(TensorProperties.create_from_tensor(value), value.size(), [whole])
        else:
            entry = BytesStorageMetadata()
        entries[_key(path)] = entry
    return Metadata(entries, planner_data={_key(path): path for path in table})


def _key(path: KeyPath) -> str:
    return ".".join(map(str, path))


class _TableReader(dcp.StorageReader):
    """Reads parts of whole tensors. Of a memory-mapped file only these parts are read."""

    def __init__(self, table: Mapping[KeyPath, Any]) -> None:
        self._values = {_key(path): value for path, value in table.items()}
        self._metadata = _describe(table)

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    @override
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            value = self._values[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                buffer = io.BytesIO()
                torch.save(value, buffer)
                buffer.seek(0)
                planner.load_bytes(item, buffer)
                continue
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                value = value.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(value)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @override
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    @override
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    @override
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @override
    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    @classmethod
    @override
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class FolderReader(dcp.FileSystemReader):
    """PyTorch's reader of a folder, whose metadata consists of PyTorch's own descriptions of tensors.

    Args:
        path: The folder.
        weights_only: Whether anything else in the metadata is refused; False to unpickle whatever they hold.
    """

    def __init__(self, path: Path, weights_only: bool | None) -> None:
        super().__init__(path)
        self._folder = path
        self._weights_only = weights_only

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads and checks the metadata.

        Raises:
            DamagedCheckpoint: They are damaged.
            ValueError: They hold something else.
        """
        with (self._folder / METADATA_FILE).open("rb") as file:
            try:
                unpickler = pickle.Unpickler if self._weights_only is False else _MetadataUnpickler
                found = unpickler(file).load()
                _check_metadata(found)
            except _OtherObject as error:
                raise _refusal(self._folder / METADATA_FILE, self._weights_only, error) from error
            except Exception as error:  # damaged pickles raise nearly every type of exception
                _refuse(self._folder, f"{METADATA_FILE} cannot be read ({_reason_of(error)})", error)
        checked: Metadata = found
        return checked


class _EntryPlanner(dcp.DefaultLoadPlanner):
    """PyTorch's planner for tables that are flat already, which reads entries that are no tensors as `torch.load` does.

    Args:
        weights_only: As for `torch.load`.
    """

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self._weights_only)


def _refusal(path: Path, weights_only: bool | None, error: Exception) -> ValueError:
    """Returns the error for a file that holds more than tensors and plain values."""
    reason = str(error).strip().splitlines()[0]
    return ValueError(
        f"{path}: holds more than weights_only={weights_only} reads; if you trust it, weights_only=False ({reason})"
    )


class _OtherObject(pickle.UnpicklingError):
    """A pickle names a class or a function that metadata do not have."""


def _member(kind: Any, name: Any) -> _MEM_FORMAT_ENCODING:
    """Takes the place of `getattr`, by which Python 3.11 pickles members of enumerations."""
    if kind is not _MEM_FORMAT_ENCODING:
        raise _OtherObject("getattr")
    return _MEM_FORMAT_ENCODING[name]


_KINDS = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
    _get_layout,
)
_KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in _KINDS},
    ("builtins", "getattr"): _member,
    ("pathlib", "PosixPath"): PurePosixPath,  # the folder to which it was written
    ("pathlib._local", "PosixPath"): PurePosixPath,
}


class _MetadataUnpickler(pickle.Unpickler):
    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise _OtherObject(f"{module}.{name}")

    @override
    def persistent_load(self, pid: Any) -> NoReturn:
        raise _OtherObject("a persistent object")


def _check_metadata(found: Any) -> None:
    """Checks the types of metadata, and that their files are in the folder.

    Raises:
        TypeError: They are others than PyTorch writes.
        ValueError: A file is elsewhere.
    """
    entries, paths, parts = found.state_dict_metadata, found.planner_data, found.storage_data
    for table, key, value in (
        (entries, str, (TensorStorageMetadata, BytesStorageMetadata)),
        (paths, str, tuple),
        (parts, MetadataIndex, _StorageInfo),
    ):
        if not all(isinstance(k, key) and isinstance(v, value) for k, v in table.items()):
            raise TypeError("a table of it has entries of other types")
    if not paths.keys() <= entries.keys():
        raise ValueError("its table of paths has entries that it does not describe")
    for entry in entries.values():
        if isinstance(entry, TensorStorageMetadata):
            kinds = isinstance(entry.properties.dtype, torch.dtype), isinstance(entry.size, torch.Size)
            if not all((*kinds, *(isinstance(chunk, ChunkStorageMetadata) for chunk in entry.chunks))):
                raise TypeError("a tensor of it is described by other types")
    for part in parts.values():
        inside = PurePosixPath(part.relative_path)
        if inside.is_absolute() or ".." in inside.parts:
            raise ValueError(f"{part.relative_path} is not a file of the folder")
        if min(int(part.offset), int(part.length)) < 0:
            raise ValueError("an entry begins before its file, or has less than no bytes")
