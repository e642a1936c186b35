"""The keys and values that kernels get for a slice."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memo.engine.attention.sliced_attention import SlicedAttention
from lightning_memo.kernels import AttentionResult, AttentionSpec
from lightning_memo.planner.token_slices import KEPT, TokenRange

TOKENS, SLICES = 8, 4


class Held:
    """Keys and values of a slice, which counts how often they are asked for."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.pair, self.asked = (k, v), 0

    def peek(self) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return self.pair

    load = peek

    def end_forward(self) -> None:
        pass


class Noting:
    """A kernel that notes its keys and values."""

    def __init__(self) -> None:
        self.given: list[tuple[Tensor, Tensor]] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> AttentionResult:
        self.given.append((k, v))
        return AttentionResult(torch.zeros_like(q), q.new_zeros(q.shape[:3]))

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        self.given.append((k, v))
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


@pytest.mark.parametrize(("window", "asked"), [(None, 2), (9, 2), (100, 2 * (SLICES - 1))])
def test_kernels_get_what_a_slice_sees(window: int | None, asked: int) -> None:
    """Without a window, each slice is brought once for the forward and once for the backward."""
    kernel = Noting()
    slices = [TokenRange(n * TOKENS, (n + 1) * TOKENS, KEPT) for n in range(SLICES)]
    attention, spec = SlicedAttention(kernel, slices), AttentionSpec(window=window)  # type: ignore[arg-type]
    k, v = torch.rand(2, 1, 2, SLICES * TOKENS, 4)
    parts = list(zip(k.split(TOKENS, 2), v.split(TOKENS, 2), strict=True))
    held = [Held(*part) for part in parts]
    for n, part in enumerate(parts):
        attention.forward(n, part[0], *part, spec)
        attention.hold(n, held[n])  # type: ignore[arg-type]
    attention.end_forward()
    for n in reversed(range(SLICES)):
        result = AttentionResult(parts[n][0], torch.zeros(1, 2, TOKENS))
        attention.backward(n, parts[n][0], parts[n][0], *parts[n], result, spec)
    order = [*range(SLICES), *reversed(range(SLICES))]
    for n, given in zip(order, kernel.given, strict=True):
        first = 0 if window is None else max(n * TOKENS - window + 1, 0) // TOKENS * TOKENS
        for whole, t in zip((k, v), given, strict=True):
            assert torch.equal(t, whole[:, :, first : (n + 1) * TOKENS])
            if window is not None and n:  # no buffer for all tokens
                assert t.untyped_storage().nbytes() == t.nbytes
    assert held[0].asked == asked
