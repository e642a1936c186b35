"""Direct preference optimisation of a LoRA adapter with TRL, and the argument that changes.

    python examples/dpo.py           with MemoCallback
    python examples/dpo.py --plain   without

The reference is the same model with its adapter switched off. Both print the same losses, up to rounding.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from tiny import save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer

from lightning_memo import MemoCallback


def main(folder: str) -> None:
    set_seed(0)
    words = {"[PAD]": 0, "[EOS]": 1, "[UNK]": 2} | {str(number): 3 + number for number in range(256)}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    # Numbers that go on counting are preferred to numbers that repeat.
    pairs = [
        {"prompt": f"{n} {n + 1} ", "chosen": " ".join(map(str, range(n + 2, n + 32))), "rejected": f"{n} " * 30}
        for n in range(64)
    ]
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(save_model(Path(folder))),
        args=DPOConfig(
            folder, max_steps=8, per_device_train_batch_size=4, learning_rate=1e-2, logging_steps=1, report_to=[],
            save_strategy="no", gradient_checkpointing=False,  # MemoCallback recomputes
            bf16=torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_list(pairs),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[EOS]", pad_token="[PAD]"),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=8, target_modules="all-linear"),
        # This argument is new. Without alpha, MemoCallback would find that a model this small needs no swapping.
        callbacks=[] if "--plain" in sys.argv else [MemoCallback(alpha=0.5)],
    )  # fmt: skip
    trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        main(temporary)
