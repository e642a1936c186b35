"""A recomputation uses the experts that the forward chose, even if its values differ in their last bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attention.recorded_training import BOUND, errors, plain_training, train
from support.families import PlainBlock, PlainModel, make_batch
from support.harness import Batch
from support.modes import BY_KIND
from torch import Tensor, nn

from lightning_memo.engine.forward.repeated_choices import NotedChoices, RepeatedChoices

pytestmark = pytest.mark.usefixtures("own_folder")

CHOICES = [
    lambda x: torch.topk(x, 3),
    lambda x: x.topk(2, dim=1, sorted=False),
    lambda x: torch.max(x, 1),
    lambda x: x.max(dim=-1, keepdim=True),
    lambda x: x.min(-1),
    lambda x: torch.sort(x, dim=1, descending=True),
    lambda x: x.argsort(-1),
    lambda x: torch.argmax(x, dim=-1),
    lambda x: x.argmin(0),
]


def saved_by(choose: Any, x: Tensor) -> tuple[Any, list[Tensor]]:
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.detach()) or t, lambda t: t):
        return choose(x), saved


@pytest.mark.parametrize("choose", CHOICES)
def test_a_choice_is_repeated(choose: Any) -> None:
    x, other = (torch.randn(5, 7, 6, generator=torch.Generator().manual_seed(n)).requires_grad_() for n in (0, 1))
    noted: list[Tensor] = []
    with NotedChoices(noted.append):
        first, saved = saved_by(choose, x)
    assert [t.dtype for t in noted] == [torch.int16]
    with RepeatedChoices(noted):
        again, saved_again = saved_by(choose, x)
    with RepeatedChoices(noted):
        changed, _ = saved_by(choose, other)
    assert type(first) is type(again)
    assert len(saved) == len(saved_again)
    for a, b in zip(saved, saved_again, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(*((t,) if isinstance(t, Tensor) else t for t in (first, again)), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype
    if isinstance(first, tuple):
        assert torch.equal(first.indices, changed.indices)
        assert not torch.equal(first.values, changed.values)
    else:
        assert torch.equal(first, changed)


@pytest.mark.parametrize(
    "compute",
    [lambda x: torch.max(x), lambda x: torch.maximum(x, x), lambda x: torch.max(x, x), lambda x: x.long().argsort(-1)],
)
def test_other_operations_are_no_choices(compute: Any) -> None:
    noted: list[Tensor] = []
    x = torch.randn(4, 6)
    with NotedChoices(noted.append):
        expected = compute(x)
    assert noted == []
    with RepeatedChoices(noted):
        assert torch.equal(compute(x), expected)


class Routed(PlainBlock):
    """A block whose router is at a tie, which other last bits decide in the backward than in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, 32, 32) / 8)
        self.router = nn.Parameter(torch.zeros(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        in_backward = torch._C._current_graph_task_id() != -1
        bits = torch.tensor([1.0, 2.0, 3.0, 4.0]).flip(0) if in_backward else torch.tensor([1.0, 2.0, 3.0, 4.0])
        scores, chosen = torch.topk((x @ self.router + 1e-7 * bits).softmax(-1), 2)
        weights = torch.zeros(*x.shape[:-1], 4).scatter(-1, chosen, scores)
        return x + torch.einsum("bti,eio,bte->bto", x, self.experts, weights).tanh()


def batch() -> Batch:
    return make_batch(2, 24)


def routed() -> nn.Module:
    return PlainModel([Routed() for _ in range(3)])


@pytest.mark.parametrize(
    "settings",
    [
        {"alpha": 0.0},
        {"alpha": 0.5},
        {"alpha": 1.0},
        {"alpha": 0.5, "slice_tokens": 8, "stream_from_host": "hidden"},
        {"test_mode": BY_KIND, "device_memory": "64KiB"},
    ],
)
def test_gradients_are_those_of_the_forward_s_experts(settings: dict[str, Any]) -> None:
    found = errors(train(routed, [batch()] * 2, **settings), plain_training(routed, batch))
    assert max(found.values()) < BOUND, found
