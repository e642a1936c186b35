"""What a mask function of transformers is told to be: the pattern, and only the patterns that kernels compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_memo.engine.attach import MaskPattern, _classify

TOKENS, BATCH = 40, 2
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

STARTS = ((0, 13), (0, 5, 30))
DOCUMENT = torch.stack([torch.searchsorted(torch.tensor(s), torch.arange(TOKENS), right=True) for s in STARTS])


def full(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q >= 0) & (k >= 0)


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return k <= q


def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (k > q - 7)


def chunked(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & (q // 7 == k // 7)


def strided(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (k <= q) & ((k == q) | (k == q - 1) | (k % 5 == 0))


def within_documents(mask: MaskFunction) -> MaskFunction:
    return lambda b, h, q, k: mask(b, h, q, k) & (DOCUMENT[b, q] == DOCUMENT[b, k])


@pytest.mark.parametrize(
    ("mask", "local_size", "pattern"),
    [
        (full, None, MaskPattern(False, None)),
        (causal, None, MaskPattern(True, None)),
        (window, 7, MaskPattern(True, 7)),
        (causal, 100, MaskPattern(True, None)),  # a window longer than the sequence
        (within_documents(full), None, MaskPattern(False, None, documents=STARTS)),
        (within_documents(causal), None, MaskPattern(True, None, documents=STARTS)),
        (within_documents(window), 7, MaskPattern(True, 7, documents=STARTS)),
        # Chunks are documents that happen to be of one length.
        (chunked, 7, MaskPattern(True, 7, documents=((0, 7, 14, 21, 28, 35),) * 2)),
    ],
)
def test_patterns(mask: MaskFunction, local_size: int | None, pattern: MaskPattern) -> None:
    assert _classify(mask, TOKENS, BATCH, local_size) == pattern


@pytest.mark.parametrize(("mask", "local_size"), [(strided, None), (window, None), (window, 6)])
def test_other_masks_are_refused(mask: MaskFunction, local_size: int | None) -> None:
    with pytest.raises(ValueError, match="neither causal, nor a sliding window, nor full") as caught:
        _classify(mask, TOKENS, BATCH, local_size)
    assert "\n" not in str(caught.value)


def test_a_single_token() -> None:
    assert _classify(causal, 1, BATCH, None) == MaskPattern(True, None)
