"""Batches of random tokens, for runs that measure time and memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face


@dataclass(frozen=True, kw_only=True)
class RandomTokens:
    """Makes batches of random tokens: `{"input_ids": [batch_size, tokens], "labels": [batch_size, tokens]}`."""

    vocabulary: int
    batch_size: int = 1

    def __call__(self, tokens: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, self.vocabulary, (self.batch_size, tokens), generator=generator)
        return {"input_ids": ids, "labels": ids}


def random_tokens(module: LightningModule) -> RandomTokens:
    """Returns random batches for a module that holds a Hugging Face model.

    Raises:
        ValueError: The module holds no such model, or one without a vocabulary.
    """
    for model in find_hugging_face(module):
        size = getattr(model.config.get_text_config(), "vocab_size", None)
        if size:
            return RandomTokens(vocabulary=size)
    raise ValueError(
        f"{class_name(module)} holds no Hugging Face model with a vocabulary (a model that configure_model builds "
        "does not exist yet): give batch_of, a function that takes a number of tokens and returns a batch for "
        "training_step"
    )
