"""A batch that is larger than the planned ones takes the memory that was planned for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.samples.callbacks import Watch
from support.trainer_harness import LanguageModel, batches, fit, loader
from torch import Tensor
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.allocator import PlannedAllocator

pytestmark = pytest.mark.usefixtures("own_folder")
SMALL = 10  # batches, of which the last are served
CPU = torch.device("cpu")


def growing() -> Any:
    def parts() -> Iterator[dict[str, Tensor]]:
        for number, batch in enumerate(loader(256)):
            yield {name: t[:, : 16 if number < SMALL else 32] for name, t in batch.items()}

    return batches(parts())


class Growing(LanguageModel):
    """Records the planned memory in the middle of the first larger batch."""

    def __init__(self) -> None:
        super().__init__("block")
        self.arena_bytes = -1
        self._larger = False
        self.model.blocks[2].register_forward_pre_hook(self._in_the_middle)

    def _in_the_middle(self, *_: Any) -> None:
        if self._larger:
            self.arena_bytes = PlannedAllocator(CPU).stats().arena_bytes

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self._larger = batch_idx == SMALL
        return super().training_step(batch, batch_idx)


def train(**settings: Any) -> tuple[Any, Growing, Watch]:
    module, watch = Growing(), Watch()
    callbacks = [watch] if settings.get("plan_memory") else []
    memo = MemoStrategy(alpha=0.5, **settings)
    return fit(memo, module, growing(), max_steps=SMALL + 14, callbacks=callbacks), module, watch


def test_the_arena_is_freed_and_planned_anew() -> None:
    """Also though the gradients of the step before are in it when the larger batch begins."""
    result, module, watch = train(plan_memory=True)
    assert module.arena_bytes == 0
    assert len(watch.stats) > SMALL and watch.stats[-1].misses == 0 < watch.stats[-1].hits
    assert result.losses == train()[0].losses
