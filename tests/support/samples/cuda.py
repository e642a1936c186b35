"""Models and batches of the tests that need a GPU."""

from __future__ import annotations

import torch
import transformers
from torch import Tensor, nn

TOKENS, VOCABULARY = 512, 96

MIB = 2**20

# Largest distance to fp64, relative to plain training's: slices round each weight gradient once more.
FARTHER = 1.25

Batch = dict[str, Tensor]

Gradients = dict[str, Tensor]


def make_model(device: torch.device | str, dtype: torch.dtype = torch.bfloat16, window: int | None = None) -> nn.Module:
    """Return a Llama model, or a Mistral model if there is a window, of six layers with grouped queries."""
    torch.manual_seed(0)
    settings = {
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "use_cache": False,
    }  # fmt: skip
    if window is None:
        config = transformers.LlamaConfig(**settings)
    else:
        config = transformers.MistralConfig(**settings, sliding_window=window)
    return transformers.AutoModelForCausalLM.from_config(config).to(device, dtype)


def make_batch(device: torch.device | str, padded: bool = False) -> Batch:
    ids = torch.randint(0, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    if not padded:
        return {"input_ids": ids.to(device), "labels": ids.clone().to(device)}
    mask = (torch.arange(TOKENS) < torch.tensor([TOKENS, TOKENS // 3])[:, None]).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids.to(device), "labels": labels.to(device), "attention_mask": mask.to(device)}


def gradients(model: nn.Module, batch: Batch) -> Gradients:
    model.zero_grad()
    model(**batch).loss.backward()
    return {name: p.grad.detach().cpu().double() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: Gradients, expected: Gradients) -> float:
    """Relative error of the whole gradient."""
    squares = sum(float((found[name] - g).norm()) ** 2 for name, g in expected.items())
    return (squares / sum(float(g.norm()) ** 2 for g in expected.values())) ** 0.5
