"""Tensors whose changes in place are noticed when they are read later."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_memo.engine.memory.saved_storages import NotedTensor

CHANGES: list[Callable[[Tensor], object]] = [
    lambda t: t.mul_(2),
    lambda t: t[1:3].zero_(),
    lambda t: t.detach().add_(1),
    lambda t: t.view(-1)[5:6].fill_(3),
    lambda t: t.T.copy_(torch.ones(50, 70)),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("inference", [False, True])
def test_changes_are_noticed(inference: bool, change: Callable[[Tensor], object]) -> None:
    with torch.inference_mode(inference):
        t = torch.randn(70, 50)
        noted = NotedTensor.of(t)
        t.clone().zero_()
        noted.check("changed")
        change(t)
        with pytest.raises(RuntimeError, match="changed"):
            noted.check("changed")


@pytest.mark.parametrize("size", [0, 1, 3, 1024, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_values_of_inference_tensors_are_compared(size: int, dtype: torch.dtype) -> None:
    """Also if the same values are in another order."""
    with torch.inference_mode():
        t = torch.randn(size).gt(0) if dtype == torch.bool else torch.randn(size).to(dtype)
        noted = NotedTensor.of(t)
        assert not noted.changed
        t.copy_(before := t.clone())
        assert not noted.changed
        t.copy_(t.roll(1))
        assert noted.changed == (not torch.equal(t, before))
        t.copy_(before.flip(0))
        assert noted.changed == (not torch.equal(t, before))
