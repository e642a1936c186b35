"""Configurations of tiny models, and a run that records what it trains on."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_memo.models import CausalLM

TINY = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}


SAVED = TINY | {"max_position_embeddings": 32}


# Dropout makes the losses depend on the random state, too.
MODEL = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "attention_dropout": 0.2,
    "bos_token_id": None,
    "eos_token_id": 256,
}


class Record(Callback):
    def __init__(self):
        self.batches = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        self.batches.append(
            (trainer.current_epoch, batch_idx, batch["input_ids"].tolist(), outputs["loss"].item(), rate)
        )


def run(folder, data, ckpt_path=None, module=CausalLM, model=None, **changes):
    record = Record()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=16,
        callbacks=[record, ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **changes,
    )
    trainer.fit(
        module({"config": MODEL | (model or {})}, lr=1e-2, warmup_steps=3), datamodule=data, ckpt_path=ckpt_path
    )
    return record.batches
