"""Gradients of weights that wait for the end of a backward, and those that do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memo.parallel.pipeline.weight_gradients import WeightGradients

PLACE = (3, 1)


class Block(nn.Module):
    """Linear layers that share an input, one with a frozen weight, one whose output is changed in place, and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(8, 16, bias=False)
        self.frozen, self.down = nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        both = self.left(normed).relu_() * self.right(normed)
        return x + self.down(self.frozen(both)) + self.down(both)


def make() -> tuple[Block, Tensor]:
    torch.manual_seed(0)
    return Block(), torch.randn(2, 5, 8, requires_grad=True)


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def gradients_of(block: nn.Module, x: Tensor) -> list[Tensor | None]:
    return [x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("is_reused", [lambda t: False, lambda t: True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_equal_those_of_autograd(dtype: torch.dtype | None, is_reused: Callable[[Tensor], bool]) -> None:
    (block, x), (expected, given) = make(), make()
    for _ in range(2):
        with autocast(dtype):
            loss = expected(given).square().sum()
        loss.backward()
    gradients = WeightGradients(is_reused)
    with gradients.computing_linear():
        for _ in range(2):
            before = block.down.weight.grad
            before = None if before is None else before.clone()
            with autocast(dtype):
                loss = block(x).square().sum()
            with gradients.waiting(PLACE):
                loss.backward()
            after = block.down.weight.grad
            assert (after is None and before is None) or torch.equal(after, before)  # it waits
            gradients.compute(PLACE)
    for found, wanted in zip(gradients_of(block, x), gradients_of(expected, given), strict=True):
        assert found is wanted is None or torch.equal(found, wanted)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_do_not_wait_for_hooks(register: str) -> None:
    (block, x), (expected, given) = make(), make()
    seen: list[list[Tensor]] = [[], []]
    for one, of in zip((block, expected), seen, strict=True):
        getattr(one.down.weight, register)(lambda t, of=of: of.append((t if t.grad is None else t.grad).clone()))
    expected(given).square().sum().backward()
    gradients = WeightGradients(lambda t: False)
    with gradients.computing_linear():
        loss = block(x).square().sum()
        with gradients.waiting(PLACE):
            loss.backward()
        assert len(seen[0]) == 1 and block.left.weight.grad is None
        gradients.compute(PLACE)
    assert len(seen[1]) == 1 and torch.equal(seen[0][0], seen[1][0])


def test_do_not_wait_outside() -> None:
    (block, x), (expected, given) = make(), make()
    expected(given).square().sum().backward()
    with WeightGradients(lambda t: False).computing_linear():
        block(x).square().sum().backward()
    for found, wanted in zip(gradients_of(block, x), gradients_of(expected, given), strict=True):
        assert found is wanted is None or torch.equal(found, wanted)


@pytest.mark.parametrize("is_reused", [False, True])
def test_memory(is_reused: bool) -> None:
    """A shared input counts once, copied or not."""
    block, x = make()
    gradients = WeightGradients(lambda t: is_reused)
    with gradients.computing_linear():
        loss = block(x).square().sum()
        with gradients.waiting(PLACE):
            loss.backward()
        tokens, inputs, outputs = 10, 8 + 2 * 16, 2 * 16 + 8  # both calls of `down` get one gradient
        assert gradients.nbytes(PLACE) == 4 * tokens * (inputs + outputs)


def test_copies_what_is_reused() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(3, 4)
    expected = torch.ones(3, 4).t().mm(x)
    gradients = WeightGradients(lambda t: t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())
    with gradients.computing_linear():
        loss = linear(x).sum()
        with gradients.waiting(PLACE):
            loss.backward()
        x.fill_(torch.nan)
        gradients.compute(PLACE)
    assert torch.equal(linear.weight.grad, expected)


def test_an_error_leaves_nothing_behind() -> None:
    before = F.linear
    with pytest.raises(ValueError, match="a user's error"), WeightGradients(lambda t: False).computing_linear():
        raise ValueError("a user's error")
    assert F.linear is before
