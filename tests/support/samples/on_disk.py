"""Layer calls that are spilled to a disk, and what they do to the system."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import transformers
from torch import nn

from support.families import FAMILIES

SWAPPED_CALLS = 4


def build(family: str = "llama") -> nn.Module:
    """A model of six layers: four are swapped."""
    torch.manual_seed(0)
    config = FAMILIES[family].build().config
    config.num_hidden_layers = SWAPPED_CALLS + 2
    return transformers.AutoModelForCausalLM.from_config(config).train()


class Counted:
    """A system call that counts the bytes it moves."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call, self.sizes = call, list[int]()

    def __call__(self, *arguments: object) -> int:
        self.sizes.append(self._call(*arguments))
        return self.sizes[-1]


def spill_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "spill" in thread.name]
