"""A script for the Trainer of Hugging Face, and the argument that changes.

    python examples/hugging_face_trainer.py           with MemoCallback
    python examples/hugging_face_trainer.py --plain   without

Both print the same losses, up to rounding. The trainers of TRL take the same callback.
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lightning_memo import MemoCallback


def main(folder: str) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 172}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=4, num_attention_heads=4))
    texts = torch.randint(0, 256, (8, 64)).repeat(1, 8)
    arguments = TrainingArguments(
        folder, max_steps=4, per_device_train_batch_size=2, logging_steps=1, report_to=[], save_strategy="no"
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": ids, "labels": ids} for ids in texts],
        # This argument is new. Without alpha, MemoCallback would find that a model this small needs no swapping.
        callbacks=[] if "--plain" in sys.argv else [MemoCallback(alpha=0.5)],
    )
    trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
