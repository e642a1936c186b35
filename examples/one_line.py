"""A plain Lightning script, and the one line that changes.

    python examples/one_line.py           with MemoStrategy
    python examples/one_line.py --plain   without

Both print the same losses, up to rounding.
"""

from __future__ import annotations

import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_memo import MemoStrategy

TOKENS = 512


class LanguageModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=4
            )
        )

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch).loss
        print(f"step {batch_idx}: loss {loss:.4f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    text = DataLoader(torch.randint(0, 256, (8, TOKENS // 8)).repeat(1, 8), batch_size=2)
    trainer = Trainer(
        # This line changes. Without alpha, MemoStrategy() would find that a model this small needs no swapping.
        strategy="auto" if "--plain" in sys.argv else MemoStrategy(alpha=0.5),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LanguageModel(), text)


if __name__ == "__main__":
    main()
