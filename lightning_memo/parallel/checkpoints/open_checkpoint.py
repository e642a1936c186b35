"""Opens checkpoints without running code from them: a sharded folder of many processes, or a file of one process.

Both are tables that map a path of keys, like `("optimizer_0", "state", "model.norm.weight", "exp_avg")`, to tensors,
which are read in parts, and to other values. torch's load planner decides which parts a sharded tensor needs.

PyTorch's reader of folders unpickles `.metadata`, and its planner the entries that are no tensors. Unpickling calls
functions that the pickle names, so that a file of a stranger could run any code.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

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

from lightning_memo.parallel.checkpoints.damage import check_folder, reading_archive, reason_of, refuse

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
                refuse(self.path, reason_of(cause), cause, verdict="cannot be read")
        return {path: flat[keys[path]] for path in destinations}

    def _destination(self, key: str, value: Any) -> Any:
        entry = self.metadata.state_dict_metadata[key]
        if value is None and isinstance(entry, TensorStorageMetadata):
            return torch.empty(entry.size, dtype=entry.properties.dtype)
        return value


def open_checkpoint(path: Path, weights_only: bool | None = None) -> CheckpointSource:
    """Opens a folder or file, without running code from it unless `weights_only` is False.

    Args:
        path: A folder that :func:`~lightning_memo.parallel.checkpoints.sharded_checkpoint.save_sharded` or Lightning's
            `ModelParallelStrategy` wrote, or a file that `Trainer.save_checkpoint` wrote in one process.
        weights_only: As for `torch.load`, for a file, and for metadata and entries of a folder that are no tensors.

    Raises:
        ValueError: The path is no checkpoint or an incomplete one, or it holds more than `weights_only` reads.
    """
    if path.is_file():
        return whole_checkpoint(path, _load_file(path, weights_only, mmap=True))
    check_folder(path)
    if not (path / REST_FILE).is_file() or not (path / METADATA_FILE).is_file():
        refuse(path, f"it needs {REST_FILE} and {METADATA_FILE}", verdict="incomplete checkpoint, or none")
    files = FolderReader(path, weights_only)
    metadata = files.read_metadata()
    reason = missing_part(path, metadata)
    if reason is not None:
        refuse(path, reason)
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
                refuse(self._folder, f"{METADATA_FILE} cannot be read ({reason_of(error)})", error)
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
