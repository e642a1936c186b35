"""Saves and loads checkpoints: a single process writes a file, several processes write a folder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.io.wrapper import _WrappingCheckpointIO
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memo.models.export_hugging_face import create_repository, export_huggingface, gather_state, upload_model
from lightning_memo.parallel.open_checkpoint import CheckpointSource, reading_archive, whole_checkpoint
from lightning_memo.parallel.ranks import on_first_rank
from lightning_memo.parallel.sharded_checkpoint import (
    open_existing,
    optimizer_names,
    optimizer_state,
    read_model,
    read_optimizer,
    refuse_other_model,
    remove_checkpoint,
    replaceable,
    save_sharded,
    sharded_model_state,
    tensor_sizes,
)
from lightning_memo.utils.files import OutputFile, commit, find_complete, unfinished
from lightning_memo.utils.find_layers import find_hugging_face


class CheckpointingStrategy(ParallelStrategy):
    """Saves and loads the model and the optimizers, whole in a single process and sharded in several.

    Lightning's order holds for both: weights are restored before the optimizers are made, and the states of optimizers
    before training starts. A sharded checkpoint is opened at first, and its weights and states are read once the model
    and the optimizers are there to take them.
    """

    _checkpoint_path: Any = "checkpoint"
    _opened: CheckpointSource | None = None
    _model_is_divided = False

    @property
    @abstractmethod
    def distributed(self) -> bool:
        """Whether the run takes part in a process group."""

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The user's `CheckpointIO`, or one that writes and reads files safely, alone or inside of the user's."""
        if self._checkpoint_io is None:
            self._checkpoint_io = CheckpointFileIO()
        elif isinstance(self._checkpoint_io, _WrappingCheckpointIO):
            self._checkpoint_io.checkpoint_io = CheckpointFileIO()  # ignored if it wraps another one
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _warn_of_unused_io(self) -> None:
        """Warn that a plugin of the user does not save what several processes do."""
        if type(self.checkpoint_io) is not CheckpointFileIO:
            rank_zero_warn(
                f"{type(self.checkpoint_io).__name__} does not save the checkpoints of this run: each process writes "
                "its part into a folder at a local path. It loads what is no such folder."
            )

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return sharded_model_state(self.model) if self.distributed else super().lightning_module_state_dict()

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self.distributed:
            return super().optimizer_state(optimizer)
        assert self.model is not None
        return optimizer_state(self.model, getattr(optimizer, "_optimizer", optimizer))

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if not self.distributed:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if storage_options is not None:
            raise TypeError("storage_options are for a CheckpointIO, and several processes write folders without one")
        save_sharded(checkpoint, self.broadcast(filepath))

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if not self.distributed:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            remove_checkpoint(filepath)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self._checkpoint_path = self.broadcast(checkpoint_path)
        self._opened = self._open(path, weights_only)
        if self._opened is None:
            checkpoint = super().load_checkpoint(path, weights_only)
        else:
            checkpoint = dict(self._opened.rest)
            if "lr_schedulers" in checkpoint:  # otherwise the checkpoint holds weights only
                checkpoint["optimizer_states"] = optimizer_names(self._opened)
        return checkpoint

    def _open(self, path: Any, weights_only: bool | None) -> CheckpointSource | None:
        """Open a checkpoint whose parts are read one by one; `None` if the `CheckpointIO` loads it as a whole."""
        local = self._reads_files_only and "://" not in str(path)
        if local and (self.distributed or _is_folder(path)):
            return open_existing(path, weights_only)
        return whole_checkpoint(path, super().load_checkpoint(path, weights_only)) if self.distributed else None

    @property
    def _reads_files_only(self) -> bool:
        """Whether the user gave no `CheckpointIO` that may read other things than files."""
        reads = self.checkpoint_io
        while isinstance(reads, _WrappingCheckpointIO) and reads.checkpoint_io is not None:
            reads = reads.checkpoint_io
        return type(reads) is CheckpointFileIO

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.lightning_module is not None
        if self._opened is not None:
            if not self.distributed or self._model_is_divided:
                self._read_weights()
            return  # `setup` reads them into a divided model
        try:
            super().load_model_state_dict(checkpoint, strict)
        except RuntimeError:  # torch's message lists every weight that differs
            own, saved = self.lightning_module.state_dict(), checkpoint["state_dict"]
            refuse_other_model(self._checkpoint_path, tensor_sizes(saved), tensor_sizes(own), strict)
            raise

    def _read_weights(self) -> None:
        """Read the weights of the opened checkpoint, if there is one, into the model."""
        assert self.model is not None and self.lightning_module is not None
        if self._opened is None:
            return
        read_model(self._opened, self.model, self.lightning_module.strict_loading)
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            self._opened = None

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._opened is None:
            super().load_optimizer_state_dict(checkpoint)
            return
        assert self.model is not None
        for name, optimizer in zip(checkpoint["optimizer_states"], self.optimizers, strict=False):
            read_optimizer(self._opened, name, self.model, optimizer)
        self._opened = None

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the Hugging Face model of the run to a folder that `from_pretrained` reads.

        All processes have to call this method. The tokenizer of the folder from which the model was loaded is written,
        too. If the model has an adapter, only the adapter is written; if the adapter was trained with extended
        positions, a warning says how to load it.

        Args:
            folder: A new or empty folder, to which the first process can write.

        Raises:
            ValueError: There was no run, it has no Hugging Face model, or the folder is not empty or cannot be written.
        """
        if self.lightning_module is None:
            raise ValueError("save_pretrained: nothing was trained with this strategy: call it after trainer.fit")
        hosts = find_hugging_face(self.lightning_module)
        if not hosts:
            raise ValueError("save_pretrained: the LightningModule holds no Hugging Face model")
        model = next((m for m in self.lightning_module.modules() if hasattr(m, "peft_config")), hosts[0])
        state = gather_state(model)

        def export() -> None:
            try:
                export_huggingface(model, folder, state)
            except OSError as error:
                raise ValueError(f"save_pretrained: {error}") from error

        on_first_rank(export)

    def push_to_hub(self, repository: str, private: bool | None = None) -> None:
        """Upload what :meth:`save_pretrained` writes to a repository of the Hugging Face Hub.

        All processes have to call this method; the first one uploads.

        Args:
            repository: `ORGANISATION/NAME` or `USER/NAME`. It is created if it does not exist.
            private: Whether a new repository is private; None for the default of the organisation or user.

        Raises:
            ValueError: The run has no Hugging Face model, the name is wrong, the user is not logged in or may not write
                there, or the Hub cannot be reached.
        """
        on_first_rank(lambda: create_repository(repository, private))
        with TemporaryDirectory() as folder:  # of each process, but only the first one writes
            self.save_pretrained(folder)
            on_first_rank(lambda: upload_model(folder, repository))


def _is_folder(path: Any) -> bool:
    """Return whether a local path is a folder, or was one that a killed save was about to replace."""
    found = find_complete(Path(path))
    return found is not None and found.is_dir()


class CheckpointFileIO(TorchCheckpointIO):
    """Writes checkpoints beside their final paths, and renames them. Paths that are not local are Lightning's.

    Lightning writes a checkpoint to the memory, copies it to a folder for temporary files, and moves it from there. If
    this folder is on another disk, a kill or a full disk leaves a part of the checkpoint under its final name.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        local = _local(path)
        if local is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = replaceable(local)
        with unfinished(target) as written:
            with OutputFile(written) as file:
                torch.save(checkpoint, file)
            commit(written, target)

    @override
    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        local = _local(path)
        if local is None or not local.is_file():
            return super().load_checkpoint(path, *args, **kwargs)
        with reading_archive(local):
            return super().load_checkpoint(path, *args, **kwargs)


def _local(path: Any) -> Path | None:
    """The path of a local file, and `None` for other file systems."""
    system, name = url_to_fs(str(path))
    return Path(name) if isinstance(system, LocalFileSystem) else None
