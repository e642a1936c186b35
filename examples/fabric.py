"""A Lightning Fabric training loop, rewritten as a module for MemoStrategy.

Fabric does not support MemoStrategy: a plan is made between the steps of a trainer, and Fabric does not know where a
step begins. The custom forward, backward, clipping and stepping of a Fabric loop move line by line into
`training_step`, with `automatic_optimization = False`.

    python examples/fabric.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import tiny
import torch
from lightning.pytorch import LightningModule, Trainer
from transformers import AutoModelForCausalLM

from lightning_memo import MemoStrategy
from lightning_memo.data import DocumentsDataModule


class OwnLoop(LightningModule):
    """The body of the loop; the comment after each line shows the corresponding Fabric call."""

    automatic_optimization = False

    def __init__(self, path: str) -> None:
        super().__init__()
        self.model = AutoModelForCausalLM.from_pretrained(path, use_cache=False).train()  # keeps documents apart

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)  # fabric.setup(model, optimizer)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.model(**batch).loss
        self.manual_backward(loss)  # fabric.backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=1.0)  # fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {batch_idx}: loss {loss:.4f}")  # fabric.print


def main(folder: Path) -> None:
    trainer = Trainer(  # Fabric(strategy=...)
        strategy=MemoStrategy(alpha=0.5),
        max_steps=5,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    documents = DocumentsDataModule(tiny.write_documents(folder), tiny.KNOWN_POSITIONS, batch_size=2)
    trainer.fit(OwnLoop(tiny.save_model(folder)), datamodule=documents)  # for batch in fabric.setup_dataloaders(...)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
