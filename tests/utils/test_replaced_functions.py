"""Functions of other packages are replaced for the calls that they were replaced for, and for no other model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import PlainBlock, PlainModel, make_batch
from support.harness import EngineUnderTest, assert_equal, loss_and_gradients
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from lightning_memo.utils.replaced_functions import function_of, replaced

BATCH = make_batch(2, 48)


class Owner:
    def method(self, n: int) -> int:
        return n

    @staticmethod
    def static(n: int) -> int:
        return n

    @classmethod
    def of_class(cls, n: int) -> int:
        return n


class Heir(Owner):
    """Inherits its functions."""


def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in another thread, and return its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


CALLS: dict[str, Callable[[type[Owner]], int]] = {
    "method": lambda owner: owner().method(1),
    "static": lambda owner: owner.static(1),
    "of_class": lambda owner: owner.of_class(1),
}


@pytest.mark.parametrize("owner", [Owner, Heir])
@pytest.mark.parametrize("name", CALLS)
def test_only_calls_of_this_thread_are_replaced(owner: type[Owner], name: str) -> None:
    before, call = vars(owner).get(name), CALLS[name]

    def tenfold(own: Callable[..., int], *args: Any) -> int:
        return 10 * own(*args)

    def and_one(own: Callable[..., int], *args: Any) -> int:
        return own(*args) + 1

    with replaced(owner, name, tenfold):
        assert (call(owner), in_thread(lambda: call(owner))) == (10, 1)
        with replaced(owner, name, and_one):
            assert call(owner) == 11
        with replaced(owner, name, and_one, chained=False):
            assert call(owner) == 2
        assert call(owner) == 10
    assert call(owner) == 1
    assert vars(owner).get(name) is before


def test_threads_that_end_in_another_order() -> None:
    own, began, may_end = CheckpointFunction.forward, threading.Event(), threading.Event()

    def run() -> None:
        with replaced(CheckpointFunction, "forward", lambda own, *args: None):
            began.set()
            may_end.wait()

    thread = threading.Thread(target=run)
    with replaced(CheckpointFunction, "forward", lambda own, *args: None):
        thread.start()
        began.wait()
    may_end.set()
    thread.join()
    assert CheckpointFunction.forward is own


def _other_model() -> float:
    """A step of a model that is trained in plain PyTorch, with activation checkpointing."""
    torch.manual_seed(3)
    block, x = PlainBlock(), torch.randn(1, 8, 32, requires_grad=True)
    total = torch.zeros(())
    for reentrant in (False, True):
        loss = checkpoint(block, x, use_reentrant=reentrant).square().sum()
        loss.backward()
        total = total + loss.detach()
    assert x.grad is not None
    return float(total + x.grad.sum())


class Beside(PlainBlock):
    """Another thread trains a model of its own while this layer runs."""

    losses: list[float]

    def forward(self, x: Tensor) -> Tensor:
        self.losses.append(in_thread(_other_model))
        return super().forward(x)


def test_a_model_of_another_thread_is_not_touched() -> None:
    expected, sdpa = _other_model(), F.scaled_dot_product_attention
    Beside.losses = []
    torch.manual_seed(0)
    model = PlainModel([Beside() for _ in range(2)])
    plain = loss_and_gradients(model, BATCH)
    with EngineUnderTest(model) as under_test:
        under_test.profile_step(BATCH)
        under_test.load(0.0)
        assert_equal(under_test.step(BATCH), plain)
    assert set(Beside.losses) == {expected}
    assert F.scaled_dot_product_attention is sdpa


def test_a_function_that_a_user_puts_there_later_is_the_one_that_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_more(own: Callable[[int], int], n: int) -> int:
        return own(n) + 1

    with replaced(Owner, "static", one_more):
        assert Owner.static(1) == function_of(Owner, "static")(1) + 1 == 2
    monkeypatch.setattr(Owner, "static", staticmethod(lambda n: 10 * n))
    assert function_of(Owner, "static")(1) == 10
    with replaced(Owner, "static", one_more):
        assert Owner.static(1) == 11
        assert in_thread(lambda: Owner.static(1)) == 10
    assert Owner.static(1) == 10
