"""Blocks that do something besides returning hidden states, and a model in which they can."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from support.families import VOCABULARY, PlainBlock, PlainModel


class Slots:
    """An object without a dict of attributes."""

    __slots__ = ("aux",)
    aux: Tensor | None


class Home(PlainModel):
    """Its blocks know it, and get a module as an argument. What they leave there is a part of the loss."""

    def __init__(self, kind: Callable[[], nn.Module]) -> None:
        super().__init__([kind() for _ in range(3)])
        self.store, self.config, self.slots = nn.BatchNorm1d(32), SimpleNamespace(aux=None), Slots()
        for block in self.blocks:
            block.home, block.config, block.slots = [self], self.config, self.slots  # type: ignore[assignment]

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:  # type: ignore[override]
        x, places = self.embed(input_ids), (self, self.store, self.config, self.slots)
        for place in places:
            place.aux = None
        for block in self.blocks:
            x = block(x, self.store)
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss + sum(p.aux.square().mean() for p in places if p.aux is not None))


def home(kind: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Home(kind)


def block_that(
    acts: Callable[[Any, Tensor], Tensor | None], start: Callable[[Any], None] = lambda block: None, blind: bool = False
) -> type[PlainBlock]:
    """Return a class of blocks that do something before they return.

    Args:
        acts: Gets the block and its output, and returns another output or `None`.
        start: Prepares a block.
        blind: Whether its forward depends on values, so that it does not run without.
    """

    class Acting(PlainBlock):
        def __init__(self) -> None:
            super().__init__()
            start(self)

        def forward(self, x: Tensor, store: nn.Module | None = None) -> Tensor:  # type: ignore[override]
            if blind and not x.isfinite().all():
                return x
            self.store = [store]
            x = super().forward(x)
            result = acts(self, x)
            del self.store
            return x if result is None else result

    return Acting
