"""QLoRA: adapters on a model whose weights bitsandbytes stores in 4 bits, with Memo.

    pip install -e ".[peft,quantized]"
    python examples/qlora.py --model meta-llama/Llama-3.1-8B --seq-len 65536

Without --model, the script saves a tiny model and takes seconds on a CPU. The text is random: take your own data.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import tiny
import torch
from lightning.pytorch import LightningModule, Trainer
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from lightning_memo import MemoStrategy


class QLoRA(LightningModule):
    """A model in 4 bits, with adapters in all of its linear modules."""

    def __init__(self, path: str, rank: int) -> None:
        super().__init__()
        self.path, self.rank = path, rank
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        in_4_bits = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        model = AutoModelForCausalLM.from_pretrained(
            self.path,
            quantization_config=in_4_bits,
            dtype=torch.bfloat16,
            device_map={"": self.trainer.strategy.root_device},
        )
        adapters = LoraConfig(task_type="CAUSAL_LM", r=self.rank, target_modules="all-linear")
        self.model = get_peft_model(model, adapters).train()  # Lightning keeps the mode, which is that of evaluation

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.parameters() if p.requires_grad), lr=1e-3)


def main(folder: Path) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or Hub id of a model")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()

    text = torch.randint(0, 256, (1, args.seq_len)).repeat(args.steps, 1)
    module = QLoRA(args.model or tiny.save_model(folder), args.rank)
    trainer = Trainer(
        strategy=MemoStrategy(),
        precision="bf16-true",
        max_steps=args.steps,
        log_every_n_steps=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, DataLoader(text, batch_size=1))
    print(f"loss {trainer.callback_metrics['loss']:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(Path(temporary))
