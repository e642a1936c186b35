"""Group relative policy optimisation with TRL, and the argument that changes.

    python examples/grpo.py           with MemoCallback
    python examples/grpo.py --plain   without

The model generates between steps as it would without the callback. The reference is a second model, which TRL loads
from the same folder. Both print the same rewards and losses, until rounding changes a token that is drawn.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tiny import save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

from lightning_memo import MemoCallback


def even_numbers(completions: list[str], **kwargs: Any) -> list[float]:
    """Rewards even numbers: returns their share in each completion."""
    words = [text.split() for text in completions]
    return [sum(word.isdigit() and int(word) % 2 == 0 for word in each) / max(len(each), 1) for each in words]


def main(folder: str) -> None:
    set_seed(0)
    words = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2} | {str(number): 3 + number for number in range(256)}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(save_model(Path(folder))),
        even_numbers,
        args=GRPOConfig(
            folder, max_steps=20, per_device_train_batch_size=8, num_generations=8, num_iterations=2, beta=0.02,
            max_completion_length=48, learning_rate=1e-2, logging_steps=1, report_to=[], save_strategy="no",
            gradient_checkpointing=False,  # MemoCallback recomputes
            bf16=torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_list([{"prompt": f"{n} {n + 1} "} for n in range(64)]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]", pad_token="[PAD]"),
        # This argument is new. Without alpha, MemoCallback would find that a model this small needs no swapping.
        callbacks=[] if "--plain" in sys.argv else [MemoCallback(alpha=0.5)],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
