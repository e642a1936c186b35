"""A plain Lightning module for causal language models. It does not depend on the strategy."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from transformers import get_cosine_with_min_lr_schedule_with_warmup
from typing_extensions import override

from lightning_memo.kernels.rng_state import RngState
from lightning_memo.models.model_builder import (
    ModelConfig,
    build_model,
    check_vocabulary,
    load_hf_config,
    warn_of_long_sequences,
)
from lightning_memo.parallel.ranks import gather


class CausalLM(LightningModule):
    """Trains a Hugging Face causal language model on batches of ``input_ids`` and ``labels``, ``[batch, seq_len]``.

    Args:
        model: Fields of `lightning_memo.models.model_builder.ModelConfig`.
        lr: Learning rate after the warm-up.
        weight_decay: Weight decay of matrices and embeddings. Norms and biases have none.
        betas: Betas of AdamW.
        warmup_steps: Number of optimizer steps of linear warm-up.
        min_lr_ratio: Final learning rate of the cosine schedule as a fraction of ``lr``.

    Raises:
        ValueError: ``model`` has neither ``config`` nor ``path``.

    Attributes:
        batch_tokens: Number of tokens in the current batch, over all data-parallel ranks.
    """

    def __init__(
        self,
        model: Mapping[str, Any],
        lr: float = 3e-4,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        warmup_steps: int = 20,
        min_lr_ratio: float = 0.1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_tokens = 0
        settings = dict(model)
        if settings.pop("liger", False):  # of checkpoints of earlier versions
            warnings.warn(
                "model.liger has no effect any more: leave it out, and see fused_kernels of MemoStrategy", stacklevel=2
            )
        self._config = ModelConfig(**settings)
        self.model: nn.Module | None = None
        self._rng_state: tuple[Tensor, Tensor | None] | None = None

    @property
    def model_folder(self) -> str | None:
        """Folder that the model is loaded from; None for random weights."""
        return self._config.folder

    @override
    def setup(self, stage: str) -> None:
        """Checks the data module's vocabulary and `seq_len`, if it has these attributes.

        Warns if sequences are longer than a saved model supports.

        Raises:
            ValueError: The model does not have embeddings for the whole vocabulary.
        """
        # The hook below only reads batches.
        warnings.filterwarnings("ignore", "You have overridden `on_before_batch_transfer` in `LightningModule` but")
        data = getattr(self.trainer, "datamodule", None)
        vocab_size, seq_len = getattr(data, "vocab_size", None), getattr(data, "seq_len", None)
        if isinstance(vocab_size, int):
            check_vocabulary(self._config, vocab_size)
        if isinstance(seq_len, int) and self._config.path is not None and stage == "fit":
            warn_of_long_sequences(load_hf_config(self._config), seq_len)

    @override
    def configure_model(self) -> None:
        """Builds the model in the precision and on the device of the trainer. Later calls do nothing."""
        if self.model is None:
            self.model = build_model(self._config)

    @override
    def on_before_batch_transfer(self, batch: dict[str, Tensor], dataloader_idx: int) -> dict[str, Tensor]:
        # Batches are still whole here. A step may get only this rank's part of the tokens.
        groups = (self.trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        self.batch_tokens = batch["input_ids"].numel() * groups
        return batch

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = self._loss(batch)
        tokens = (self.trainer.fit_loop.total_batch_idx + 1) * self.batch_tokens
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("tokens", float(tokens))
        return loss

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch), prog_bar=True, sync_dist=True)

    @override
    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        weights = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in weights if p.ndim >= 2], "weight_decay": self.hparams["weight_decay"]},
            {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=self.hparams["lr"], betas=tuple(self.hparams["betas"])
        )
        scheduler = get_cosine_with_min_lr_schedule_with_warmup(
            optimizer,
            num_warmup_steps=self.hparams["warmup_steps"],
            num_training_steps=int(self.trainer.estimated_stepping_batches),
            min_lr_rate=self.hparams["min_lr_ratio"],
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # Lightning saves no random state. With dropout, a resumed run would differ from an uninterrupted one.
        present = RngState.capture(self.trainer.strategy.root_device)  # after a fit, the module is no longer there
        checkpoint["rng_states"] = gather((present.cpu, present.accelerator))

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        states = checkpoint.get("rng_states")
        if states is not None:
            # If the number of processes has changed, all of them take the state of the first.
            self._rng_state = states[self.global_rank if len(states) == self.trainer.world_size else 0]
        elif "rng_state" in checkpoint:  # of older versions, which saved only the CPU state of the first process
            self._rng_state = checkpoint["rng_state"], None

    @override
    def on_train_start(self) -> None:
        if self._rng_state is not None:
            cpu, accelerator = self._rng_state
            RngState(self.device, cpu, accelerator if self.device.type == "cuda" else None).restore()
            self._rng_state = None

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch).loss
        return loss
