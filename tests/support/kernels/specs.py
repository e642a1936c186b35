"""Attention specs and inputs that tests of kernels have in common."""

from __future__ import annotations

import torch

from lightning_memo.kernels import AttentionSpec
from support.kernels.attention_reference import Inputs

FP32_BOUND = 2e-6
SPECS = {
    "causal": AttentionSpec(),
    "full": AttentionSpec(causal=False),
    "scaled": AttentionSpec(scale=0.7),
    "window": AttentionSpec(window=5),
    "window of one": AttentionSpec(window=1),
    "window beyond all": AttentionSpec(window=100),
    "lengths": AttentionSpec(lengths=(24, 7)),
    "full lengths": AttentionSpec(causal=False, lengths=(9, 24)),
    "window lengths": AttentionSpec(window=4, lengths=(24, 6)),
}


def without_memory(queries: int = 24, head: int = 64, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    """Tensors without memory, for which operators check their arguments and return shapes."""
    shapes = [(4, queries), (2, 24), (2, 24), (4, queries)]
    return Inputs(*(torch.empty(2, n, tokens, head, dtype=dtype, device="meta") for n, tokens in shapes))
