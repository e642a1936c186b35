"""Batches without rows or tokens, or with a single token, train as in plain training, in the first step and later."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.families import VOCABULARY, PlainBlock
from support.modes import BY_KIND
from support.trainer_harness import LanguageModel, batches, fit, plain
from torch import Tensor, nn

from lightning_memo import MemoStrategy


class Model(nn.Module):
    """Adds up the squares of its logits, of which there may be none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY)
        self.blocks = nn.ModuleList([PlainBlock() for _ in range(2)])

    def forward(self, input_ids: Tensor, **others: Tensor) -> Any:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(loss=self.head(x).square().sum() / 1000)


def _data(shapes: list[tuple[int, int]]) -> Any:
    drawn = torch.Generator().manual_seed(0)
    return batches({"input_ids": torch.randint(0, VOCABULARY, shape, generator=drawn)} for shape in shapes)


FULL = (2, 8)
ORDERS: dict[str, list[tuple[int, int]]] = {
    "no rows first": [(0, 8), FULL, FULL],
    "no tokens first": [(2, 0), FULL, FULL],
    "one token first": [(2, 1), FULL, FULL],
    "short ones later": [FULL, (0, 8), FULL, (2, 0), (1, 1), FULL],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "half": {"alpha": 0.5},
    "kinds": {"test_mode": BY_KIND, "device_memory": "64KiB"},
    "host": {"alpha": 0.5, "slice_tokens": 3, "stream_from_host": "hidden"},
}


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("order", ORDERS)
def test_short_batches(order: str, settings: str) -> None:
    shapes = ORDERS[order]
    expected = plain(LanguageModel(Model, lr=1e-5), _data(shapes), max_steps=len(shapes))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "lightning_memo: nothing is swapped")
        result = fit(
            MemoStrategy(**SETTINGS[settings]), LanguageModel(Model, lr=1e-5), _data(shapes), max_steps=len(shapes)
        )
    assert result.losses == pytest.approx(expected.losses, rel=1e-6)
    for p, q in zip(result.module.parameters(), expected.module.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
    assert not any(result.held)
