"""A small tokenizer with chat templates, drawn chats and prompts, and what TRL makes of them."""

from __future__ import annotations

import random
import tempfile
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
from trl import chat_template_utils as trl_templates

from lightning_memo.models import ModelConfig, build_model
from support.samples.models import TINY

SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>",
]  # fmt: skip
_WORDS = [
    "the",
    "model",
    "reads",
    "long",
    "texts",
    "and",
    "answers",
    "naïve",
    "日本語",
    "🙂",
    "x=1;",
    "\n",
    "\n\n",
    "  ",
]


def text(chance: random.Random, least: int = 1) -> str:
    """Returns words, lines and spaces, with characters of several bytes."""
    return "".join(chance.choice(_WORDS) + chance.choice(["", " "]) for _ in range(chance.randint(least, 8)))


def pairs(count: int) -> list[dict[str, str]]:
    chance = random.Random(0)
    return [{"prompt": text(chance, 0), "completion": text(chance)} for _ in range(count)]


TEMPLATES = {
    "qwen2_5": trl_templates.qwen2_5_chat_template,
    "qwen3": trl_templates.qwen3_chat_template,
    "llama3": trl_templates.llama3_chat_template,
    "gemma": trl_templates.gemma_chat_template,
    "phi3": trl_templates.phi3_chat_template,
}


def training_template(name: str) -> str:
    """Returns the template with marks that TRL trains tokenizers of a template of `TEMPLATES` with."""
    found = trl_templates.get_training_chat_template(tokenizer(TEMPLATES[name]))
    assert found is not None
    return str(found)


def chats(count: int, system: bool = True, turns: int = 6) -> list[dict[str, Any]]:
    """Returns drawn chats of 1 to `turns` turns of the assistant, some with a system message and some empty."""
    chance, drawn = random.Random(2), []
    for _ in range(count):
        messages = [{"role": "system", "content": text(chance)}] if system and chance.random() < 0.5 else []
        for _ in range(chance.randint(1, turns)):
            messages.append({"role": "user", "content": text(chance, 0)})
            messages.append({"role": "assistant", "content": text(chance, 0)})
        drawn.append({"messages": messages})
    return drawn


def tokenizer(chat_template: str | None = None, eos: str = "<|endoftext|>", bos: str = "<bos>") -> Any:
    """Returns a byte-level tokenizer whose merges cross the limits of words and lines."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    chance = random.Random(1)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([text(chance) for _ in range(300)], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos, bos_token=bos)
    made.chat_template = chat_template
    return made


def labels_of_trl(records: list[dict[str, Any]], tokenizer: Any, **config: Any) -> list[tuple[list[int], list[int]]]:
    """Returns the ids and labels that TRL's `SFTTrainer` trains for records."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            build_model(ModelConfig(config=TINY)),
            SFTConfig(folder, use_cpu=True, report_to="none", bf16=False, max_length=None, **config),
            train_dataset=Dataset.from_list(records),
            processing_class=tokenizer,
        )
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]
