"""Attention sinks and soft caps train in two processes as in one: ring and Ulysses attention, slices, packed rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.attention import attention_models
from support.devices import skip_ring_on_cuda
from support.divided_training import RING, ULYSSES, check
from support.families import make_batch
from support.harness import Batch
from torch import nn

WAYS = {
    "whole layers": {"alpha": 0.0},
    "slices": {"alpha": 0.5, "slice_tokens": 8},
    "slices on the host": {"alpha": 1.0, "slice_tokens": 8, "stream_from_host": "hidden"},
}


def rows(seed: int) -> Batch:
    return make_batch(2, 48, padded=True, seed=seed)


def packed(seed: int) -> Batch:
    first = 17 + 5 * seed
    positions = torch.cat([torch.arange(first), torch.arange(48 - first)])
    return {**make_batch(2, 48, seed=seed), "position_ids": positions.expand(2, -1).clone()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("context", [RING, ULYSSES], ids=["ring", "ulysses"])
@pytest.mark.parametrize(
    ("build", "batch"), [(attention_models.gpt_oss, rows), (attention_models.gemma2, packed)], ids=["gpt_oss", "gemma2"]
)
def test_gradients(
    build: Callable[[], nn.Module], batch: Callable[[int], Batch], context: dict[str, Any], way: str
) -> None:
    skip_ring_on_cuda(context)
    check(build, [batch(seed) for seed in range(2)], {**context, **WAYS[way]})
