"""A proof does without what PyTorch's fake collectives draw from Python's generator."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from typing_extensions import override

from lightning_memo.engine.token_locality.fake_run import TrialMode


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


class Exchanging(nn.Module):
    @override
    def forward(self, x: Tensor) -> Tensor:
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x)
        return result


def test_an_exchange_draws_no_number(group: dist.ProcessGroup) -> None:
    before = random.getstate()
    with TrialMode() as mode:
        Exchanging()(mode.input((4, 8), torch.ones(1)))
    assert random.getstate() == before
