"""Saves and loads checkpoints: a single process writes a file, several processes write a folder."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memo.models.export_hugging_face import export_huggingface, gather_state
from lightning_memo.models.hub_upload import create_repository, upload_model
from lightning_memo.parallel.checkpoints.sharded_checkpoint import (
    load_sharded,
    optimizer_state,
    refuse_other_model,
    remove_checkpoint,
    save_sharded,
    sharded_model_state,
    tensor_sizes,
)
from lightning_memo.parallel.run_on_ranks import on_first_rank
from lightning_memo.utils.find_layers import find_hugging_face


class CheckpointingStrategy(ModelParallelStrategy):
    """Saves and loads the model and the optimizers, whole in a single process and sharded in several."""

    _loaded_in_place = False
    _checkpoint_path: str | Path = "checkpoint"

    @property
    @abstractmethod
    def distributed(self) -> bool:
        """Whether the run takes part in a process group."""

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # the callback that `setup` adds reads its plan from the checkpoint

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return not self._loaded_in_place

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return sharded_model_state(self.model) if self.distributed else Strategy.lightning_module_state_dict(self)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if self._loaded_in_place:
            return
        try:
            Strategy.load_model_state_dict(self, checkpoint, strict)
        except RuntimeError:  # torch's message lists every weight that differs
            assert self.lightning_module is not None
            own, saved = self.lightning_module.state_dict(), checkpoint["state_dict"]
            refuse_other_model(self._checkpoint_path, tensor_sizes(saved), tensor_sizes(own), strict)
            raise

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not self.distributed:
            return Strategy.optimizer_state(self, optimizer)
        assert self.model is not None
        return optimizer_state(self.model, getattr(optimizer, "_optimizer", optimizer))

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if not self._loaded_in_place:
            Strategy.load_optimizer_state_dict(self, checkpoint)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.distributed:
            save_sharded(checkpoint, Path(self.broadcast(filepath)))
        else:
            Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = self._checkpoint_path = Path(self.broadcast(checkpoint_path))
        self._loaded_in_place = self.distributed or not path.is_file()
        if not self._loaded_in_place:
            return Strategy.load_checkpoint(self, checkpoint_path, weights_only)
        assert self.model is not None and self.lightning_module is not None
        fitting = self.lightning_module.trainer.state.fn == TrainerFn.FITTING
        optimizers = self.optimizers if fitting else ()
        return load_sharded(path, self.model, optimizers, self.lightning_module.strict_loading, weights_only)

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
                raise ValueError(
                    f"save_pretrained: {folder} cannot be written ({error.strerror or error}): give a folder that can"
                ) from error

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

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if self.is_global_zero:
            remove_checkpoint(Path(filepath))
