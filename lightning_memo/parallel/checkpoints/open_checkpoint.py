"""A common interface for reading checkpoints: a sharded folder of many processes, or a file of one process.

Both are tables that map a path of keys, like `("optimizer_0", "state", "model.norm.weight", "exp_avg")`, to tensors,
which are read in parts, and to other values. torch's load planner decides which parts a sharded tensor needs.
"""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future
from typing_extensions import override

REST_FILE = "meta.pt"
"""File of a checkpoint folder with everything but weights and optimizer state. Lightning uses the same name."""

KeyPath = tuple[Any, ...]


@dataclass(frozen=True)
class CheckpointSource:
    """An opened checkpoint.

    Attributes:
        path: Folder or file of the checkpoint.
        rest: Entries that are neither weights nor optimizer state.
        metadata: Sizes and types of the entries.
        reader: Reads the entries.
    """

    path: Path
    rest: dict[str, Any]
    metadata: Metadata
    reader: dcp.StorageReader

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
            ValueError: The files are damaged.
        """
        keys = {path: key for key, path in self.metadata.planner_data.items()}
        flat = {keys[path]: self._destination(keys[path], value) for path, value in destinations.items()}
        planner = dcp.DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is")  # reading alone is intended
            try:
                dcp.load(flat, storage_reader=self.reader, planner=planner, no_dist=True)
            except dcp.CheckpointException as error:
                cause, _ = error.failures[0]
                raise ValueError(f"{self.path}: cannot be read: {str(cause).splitlines()[0]}") from cause
        return {path: flat[keys[path]] for path in destinations}

    def _destination(self, key: str, value: Any) -> Any:
        entry = self.metadata.state_dict_metadata[key]
        if value is None and isinstance(entry, TensorStorageMetadata):
            return torch.empty(entry.size, dtype=entry.properties.dtype)
        return value


def open_checkpoint(path: Path, weights_only: bool | None = None) -> CheckpointSource:
    """Opens a folder or file.

    Args:
        path: A folder that :func:`~lightning_memo.parallel.checkpoints.sharded_checkpoint.save_sharded` or Lightning's
            `ModelParallelStrategy` wrote, or a file that `Trainer.save_checkpoint` wrote in one process.
        weights_only: As for `torch.load`, for a file and for entries of a folder that are no tensors.

    Raises:
        ValueError: The path is no checkpoint, or an incomplete one.
    """
    if path.is_file():
        checkpoint = _load_file(path, weights_only, mmap=True)
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise ValueError(f"{path}: no checkpoint: a file that Trainer.save_checkpoint wrote holds a state_dict")
        reader = _TableReader(dict(_table(checkpoint)))
        return CheckpointSource(path, checkpoint, reader.read_metadata(), reader)
    if not (path / REST_FILE).is_file() or not (path / ".metadata").is_file():
        raise ValueError(f"{path}: incomplete checkpoint, or none: it needs {REST_FILE} and .metadata")
    files = dcp.FileSystemReader(path)
    try:
        metadata = files.read_metadata()
    except (pickle.UnpicklingError, EOFError) as error:
        raise ValueError(f"{path}: incomplete checkpoint: .metadata cannot be read: {error}") from error
    check_complete(path, metadata)
    return CheckpointSource(path, _load_file(path / REST_FILE, weights_only), metadata, files)


def check_complete(folder: Path, metadata: Metadata) -> None:
    """Checks that all files of a folder exist and have their full size.

    Raises:
        ValueError: A file is missing or too short.
    """
    sizes: dict[str, int] = {}
    for part in metadata.storage_data.values():
        sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
    for name, size_bytes in sizes.items():
        file = folder / name
        found_bytes = file.stat().st_size if file.is_file() else None
        if found_bytes is None or found_bytes < size_bytes:
            state = "is missing" if found_bytes is None else f"has {found_bytes} of {size_bytes} bytes"
            raise ValueError(
                f"{folder}: incomplete checkpoint: {name} {state}; all processes must write to one file system"
            )


def _load_file(path: Path, weights_only: bool | None, mmap: bool = False) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only, mmap=mmap)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{path}: holds more than weights_only={weights_only} reads; if you trust it, weights_only=False ({reason})"
        ) from error
    except (RuntimeError, EOFError) as error:
        raise ValueError(f"{path}: no checkpoint: {str(error).splitlines()[0]}") from error


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
