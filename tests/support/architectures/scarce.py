"""A model that runs out of device memory where a test says."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from typing_extensions import override

from support.trainer_harness import LanguageModel


class Watched(nn.LayerNorm):
    """Calls a function before each forward."""

    def __init__(self, hidden: int, begin: Callable[[], None]) -> None:
        super().__init__(hidden)
        self._begin = begin

    @override
    def forward(self, input: Tensor) -> Tensor:
        self._begin()
        return super().forward(input)


class Scarce(LanguageModel):
    """Runs out of device memory in some attempts at a batch: in a layer's forward, or in its backward.

    Args:
        fails: The batch and, attempt by attempt, where: "forward", "backward", or "" for nowhere.
    """

    def __init__(self, fails: dict[int, list[str]]) -> None:
        super().__init__()
        self._fails, self._where = {batch: list(places) for batch, places in fails.items()}, ""
        norm = self.model.blocks[1].norm2 = Watched(32, lambda: self._run_out("forward"))
        norm.weight.register_hook(lambda gradient: self._run_out("backward"))

    def _run_out(self, where: str) -> None:
        if self._where == where:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nAnd much more of this.")

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._where = self._fails[batch_idx].pop(0) if self._fails.get(batch_idx) else ""
        loss = self.loss(batch)
        self._last = loss.item()
        return loss

    @override
    def on_train_batch_end(self, *args: object) -> None:
        self.losses.append(self._last)
