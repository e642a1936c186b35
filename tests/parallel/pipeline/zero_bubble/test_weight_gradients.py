"""Gradients of weights that wait for the end of a backward, and those that do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memo.parallel.pipeline.pipeline_gradients import WeightGradients

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


def weight_gradients(is_reused: bool = False) -> WeightGradients:
    return WeightGradients(lambda t: PLACE if is_reused else None)


def autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def gradients_of(block: nn.Module, x: Tensor) -> list[Tensor | None]:
    return [x.grad, *(p.grad for p in block.parameters())]


@pytest.mark.parametrize("is_reused", [False, True])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_equal_those_of_autograd(dtype: torch.dtype | None, is_reused: bool) -> None:
    (block, x), (expected, given) = make(), make()
    for _ in range(2):
        with autocast(dtype):
            loss = expected(given).square().sum()
        loss.backward()
    gradients = weight_gradients(is_reused)
    with gradients.computing_linear():
        for _ in range(2):
            before = block.down.weight.grad
            before = None if before is None else before.clone()
            with autocast(dtype):
                loss = block(x).square().sum()
            with gradients.waiting(PLACE, loss):
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
    gradients = weight_gradients()
    with gradients.computing_linear():
        loss = block(x).square().sum()
        with gradients.waiting(PLACE, loss):
            loss.backward()
        assert len(seen[0]) == 1 and block.left.weight.grad is None
        gradients.compute(PLACE)
    assert len(seen[1]) == 1 and torch.equal(seen[0][0], seen[1][0])


def with_inner_gradient(linear: nn.Linear, x: Tensor) -> Tensor:
    y = linear(x)

    def add(gradient: Tensor) -> Tensor:
        z = x.detach().requires_grad_()
        with torch.enable_grad():
            return gradient + torch.autograd.grad(linear(z).square().sum(), z)[0].sum()

    y.register_hook(add)
    return y


def with_penalty(linear: nn.Linear, x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(linear(x).square().sum(), x, create_graph=True)
    return linear(x) + slope.square().sum()


def in_two_types(linear: nn.Linear, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = linear(x)
    return y + linear(x)


USES: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "a gradient inside of the backward": with_inner_gradient,
    "a gradient of a gradient": with_penalty,
    "two types": in_two_types,
    "complex numbers": lambda linear, x: linear.to(torch.complex64)(x * (1 + 1j)).abs(),
    "columns": lambda linear, x: linear(x.transpose(1, 2).contiguous().transpose(1, 2)),
    "a bias with two dimensions": lambda linear, x: F.linear(x, linear.weight, linear.bias[None]),
    "vmap": lambda linear, x: torch.vmap(linear)(x),
    "parts of a weight": lambda linear, x: F.linear(x, linear.weight[:3]) + F.linear(x, linear.weight)[..., :3],
    "keywords": lambda linear, x: F.linear(bias=linear.bias, weight=linear.weight, input=x),
    "one dimension": lambda linear, x: linear(x[0, 0]),
}


@pytest.mark.parametrize("is_reused", [False, True])
@pytest.mark.parametrize("name", USES)
def test_other_uses(name: str, is_reused: bool) -> None:
    found = []
    for waits in (False, True):
        torch.manual_seed(0)
        linear, x = nn.Linear(8, 8), torch.randn(1, 5, 8, requires_grad=True)
        gradients = weight_gradients(is_reused)
        with gradients.computing_linear() if waits else contextlib.nullcontext():
            loss = USES[name](linear, x).square().sum()
            with gradients.waiting(PLACE, loss) if waits else contextlib.nullcontext():
                loss.backward()
            gradients.compute(PLACE)
        found.append(gradients_of(linear, x))
    for ours, expected in zip(*found, strict=True):
        # A weight that has other uses, too, gets the sums of its gradients in another order.
        assert ours is expected is None or torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_changed_while_it_waits() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    gradients = weight_gradients()
    with gradients.computing_linear():
        y = linear(x)
        kept = []
        y.register_hook(kept.append)
        loss = y.square().sum()
        with gradients.waiting(PLACE, loss):
            loss.backward()
        kept[0].mul_(2)
        with pytest.raises(RuntimeError, match=r"was changed in place .* set pipeline_schedule"):
            gradients.compute(PLACE)


def test_a_function_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x, own = nn.Linear(4, 4), torch.randn(3, 4), F.linear
    monkeypatch.setattr(F, "linear", lambda x, weight, bias: own(x, weight.round(), bias))
    gradients = weight_gradients()
    warns = pytest.warns(UserWarning, match="has no effect, because torch.nn.functional.linear is")
    with warns, gradients.computing_linear():
        assert torch.equal(linear(x), own(x, linear.weight.round(), linear.bias))


def test_do_not_wait_outside() -> None:
    (block, x), (expected, given) = make(), make()
    expected(given).square().sum().backward()
    with weight_gradients().computing_linear():
        block(x).square().sum().backward()
    for found, wanted in zip(gradients_of(block, x), gradients_of(expected, given), strict=True):
        assert found is wanted is None or torch.equal(found, wanted)


@pytest.mark.parametrize("is_reused", [False, True])
def test_memory(is_reused: bool) -> None:
    """A shared input counts once, copied or not."""
    block, x = make()
    gradients = weight_gradients(is_reused)
    with gradients.computing_linear():
        loss = block(x).square().sum()
        with gradients.waiting(PLACE, loss):
            loss.backward()
        tokens, inputs, outputs = 10, 8 + 2 * 16, 2 * 16 + 8  # both calls of `down` get one gradient
        assert gradients.nbytes(PLACE) == 4 * tokens * (inputs + outputs)


def test_copies_what_is_reused() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(3, 4)
    expected = torch.ones(3, 4).t().mm(x)
    gradients = weight_gradients(True)
    with gradients.computing_linear():
        loss = linear(x).sum()
        with gradients.waiting(PLACE, loss):
            loss.backward()
        x.fill_(torch.nan)
        gradients.compute(PLACE)
    assert torch.equal(linear.weight.grad, expected)


def test_an_error_leaves_nothing_behind() -> None:
    before = F.linear
    with pytest.raises(ValueError, match="a user's error"), weight_gradients().computing_linear():
        raise ValueError("a user's error")
    assert F.linear is before
