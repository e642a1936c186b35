"""Fine-tunes a saved Hugging Face model on your own documents, with longer rows than it was trained on.

    python examples/finetune_documents.py --model FOLDER --documents FILE_OR_FOLDER --seq-len 131072 --lora 16

All weights are trained, or LoRA adapters with --lora. Documents are JSON lines or Parquet files with texts ("text"),
chats ("messages") or prompts with completions ("prompt", "completion"), text files, or a data set of the Hugging Face
Hub. Without --model and --documents, the script creates tiny ones and takes seconds on a CPU. For several GPUs,
start it with torchrun and set the parallel sizes of MemoStrategy.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import tiny
import torch
from lightning.pytorch import LightningModule, Trainer

from lightning_memo import MemoStrategy
from lightning_memo.data import DocumentsDataModule
from lightning_memo.models import ModelConfig, build_model, load_hf_config


class FineTuning(LightningModule):
    """Any Lightning module works; this one builds its model in `configure_model`."""

    def __init__(self, model: ModelConfig, lr: float) -> None:
        super().__init__()
        self.config, self.lr = model, lr
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = build_model(self.config)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=self.lr)


def main(folder: Path) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a saved model and its tokenizer")
    parser.add_argument("--documents", help="file, folder or data set of the Hub")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--lora", type=int, default=0, help="rank of the adapters; 0 trains all weights")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--precision", default="32-true", help="bf16-mixed or bf16-true on a GPU")
    parser.add_argument("--output", default="finetuned", help="folder for the trained model")
    args = parser.parse_args()
    path = args.model or tiny.save_model(folder)

    # Beyond the positions that the model supports, the loss would start far too high.
    known = load_hf_config(ModelConfig(path=path)).max_position_embeddings
    longer = {"rope_scaling": "yarn", "max_position_embeddings": args.seq_len} if args.seq_len > known else {}
    adapters = {"r": args.lora, "target_modules": "all-linear"} if args.lora else {}

    trainer = Trainer(
        strategy=MemoStrategy(),
        max_steps=args.steps,
        precision=args.precision,
        limit_val_batches=4,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(
        FineTuning(ModelConfig(path=path, lora=adapters, **longer), args.lr),
        datamodule=DocumentsDataModule(
            args.documents or tiny.write_documents(folder), args.seq_len, tokenizer=args.model, val_fraction=0.1
        ),
    )
    trainer.strategy.save_pretrained(args.output)
    print(f"train loss {trainer.callback_metrics['train_loss']:.3f}, saved to {args.output}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
