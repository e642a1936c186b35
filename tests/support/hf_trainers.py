"""Trainers of Hugging Face and TRL for small models, and what they have trained."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import save_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from lightning_memo import MemoCallback
from support.devices import DEVICE
from support.families import FAMILIES
from support.parallel_training import whole

LETTERS = [chr(ord("a") + n) for n in range(26)]
STEPS = 5
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "max_steps": STEPS, "report_to": [], "save_strategy": "no", "logging_steps": 1,
    "use_cpu": DEVICE.type == "cpu", "learning_rate": 1e-2, "optim": "sgd", "disable_tqdm": True, "bf16": False,
    "seed": 1, "gradient_checkpointing": False,
}  # fmt: skip


def build(family: str = "llama") -> Any:
    torch.manual_seed(0)
    return FAMILIES[family].build()


def random_text(length: int) -> str:
    return "".join(LETTERS[n] for n in torch.randint(0, len(LETTERS), (length,)).tolist())


def tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *LETTERS])}
    letters = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=256
    )


def rows(count: int = 24) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 29, (40,), generator=generator) for _ in range(count)]
    return [{"input_ids": t, "labels": t} for t in ids]


class Outcome:
    """What a trainer has logged and trained."""

    def __init__(self, trainer: Trainer) -> None:
        self.logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        self.weights = {name: whole(p).cpu() for name, p in trainer.model.named_parameters()}

    def compare(self, plain: Outcome, rounding: float = 0.0) -> None:
        assert len(self.logs) == len(plain.logs) == STEPS
        for key in ("loss", "grad_norm"):
            expected = [entry[key] for entry in plain.logs]
            assert [entry[key] for entry in self.logs] == pytest.approx(expected, rel=2e-5, abs=rounding)
        for name, weight in plain.weights.items():
            torch.testing.assert_close(self.weights[name], weight, rtol=1e-5, atol=1e-6, msg=name)


def train(trainer: Trainer) -> Outcome:
    torch.manual_seed(1)  # dropout
    trainer.train()
    return Outcome(trainer)


def of_rows(
    memo: MemoCallback | None, family: str = "llama", kind: type[Trainer] = Trainer, **arguments: Any
) -> Trainer:
    callbacks = [] if memo is None else [memo]
    data, settings = rows(), TrainingArguments(**ARGUMENTS | arguments)
    return kind(build(family), settings, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks)


def supervised(memo: MemoCallback | None, adapter: LoraConfig | None = None, **arguments: Any) -> Trainer:
    torch.manual_seed(2)
    texts = Dataset.from_list([{"text": random_text(30 + n)} for n in range(16)])
    return SFTTrainer(
        build(), SFTConfig(**ARGUMENTS | arguments), train_dataset=texts, processing_class=tokenizer(),
        peft_config=adapter, callbacks=[] if memo is None else [memo],
    )  # fmt: skip


def preferring(memo: MemoCallback | None, adapter: LoraConfig | None = None, **arguments: Any) -> Trainer:
    torch.manual_seed(2)
    pairs = [{"prompt": random_text(10), "chosen": random_text(20 + n), "rejected": random_text(15)} for n in range(16)]
    return DPOTrainer(
        build(), None if adapter else build(), DPOConfig(**ARGUMENTS | arguments),
        train_dataset=Dataset.from_list(pairs), processing_class=tokenizer(), peft_config=adapter,
        callbacks=[] if memo is None else [memo],
    )  # fmt: skip


def rewarded(memo: MemoCallback | None, adapter: LoraConfig | None = None, **arguments: Any) -> Trainer:
    """Prompts of different lengths, two steps for each generation, and a reference model if `beta` is given."""
    torch.manual_seed(2)
    prompts = Dataset.from_list([{"prompt": random_text(4 + n % 5)} for n in range(16)])
    settings = {
        "per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 2, "num_iterations": 2,
        "max_completion_length": 24, "temperature": 0.7,
    }  # fmt: skip

    def vowels(completions: list[str], **kwargs: Any) -> list[float]:
        return [sum(letter in "aeiou" for letter in text) / 24 for text in completions]

    model = build()
    with tempfile.TemporaryDirectory() as folder:  # from which TRL loads the reference
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)  # `model.save_pretrained` writes in the first process only
        save_model(model, f"{folder}/model.safetensors", metadata={"format": "pt"})
        return GRPOTrainer(
            type(model).from_pretrained(folder), vowels, GRPOConfig(**ARGUMENTS | settings | arguments),
            train_dataset=prompts, processing_class=tokenizer(), peft_config=adapter,
            callbacks=[] if memo is None else [memo],
        )  # fmt: skip
