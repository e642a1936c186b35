"""Under autocast, low-precision copies of weights are freed with the layer that uses them."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.families import FAMILIES, make_batch
from support.harness import EngineUnderTest, Step, assert_equal, gradients_of, loss_and_gradients
from support.markers.slow import slow_if
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.artifacts.swap_plan import StreamFromHost
from lightning_memo.engine.saved_tensors.call_arguments import WeightCopies

BATCH = make_batch(2, 48)
FEW = ("llama", "gpt2_dropout")
QUICK = (
    "llama-0.5-as Lightning enters it", "llama-0.5-of frozen weights", "gpt2_dropout-0.0-as Lightning enters it",
)  # fmt: skip


class CopiesOf(TorchDispatchMode):
    """Records the memory of every copy of some tensors in another dtype."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__()
        self._addresses = {w.data_ptr() for w in weights}
        self.made: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].data_ptr() in self._addresses:
            self.made.append(StorageWeakRef(out.untyped_storage()))
        return out

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(not made.expired() for made in self.made)


def build(family: str, frozen: bool = False) -> tuple[nn.Module, list[nn.Parameter]]:
    """A model and the weight matrices of its layers; if they are frozen, norms and embeddings are trained."""
    torch.manual_seed(0)
    model = FAMILIES[family].build().train()
    layers = [p for name, p in model.named_parameters() if ("layers." in name or ".h." in name) and p.dim() == 2]
    assert layers
    for weight in layers:
        weight.requires_grad_(not frozen)
    return model, layers


@slow_if(lambda case_id: case_id not in QUICK)
@pytest.mark.parametrize(
    ("cached", "frozen"),
    [(False, False), (True, False), (False, True)],
    ids=["as Lightning enters it", "with autocast's own cache", "of frozen weights"],
)
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", FEW)
def test_no_copy_of_a_layers_weight_waits_for_the_backward(
    family: str, alpha: float, cached: bool, frozen: bool
) -> None:
    model, weights = build(family, frozen)
    expected = loss_and_gradients(model, BATCH, amp=True)
    with EngineUnderTest(model) as under_test:
        under_test.profile_step(BATCH, amp=True)
        under_test.load(alpha)
        model.zero_grad()
        torch.manual_seed(5)
        with CopiesOf(weights) as copies:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                loss = model(**BATCH).loss
                assert len(copies.made) >= len(weights)
                assert copies.alive == 0
            loss.backward()
        assert copies.alive == 0
        actual = Step(loss.detach().clone(), gradients_of(model))
    if alpha in (0.0, 1.0):
        assert_equal(actual, expected)
    else:
        assert actual.distance(expected) <= 4 * 2**-9  # a few roundings of bf16, 2**-9 of a value at most, differ


@pytest.mark.slow
@pytest.mark.parametrize("stream_from_host", ["hidden", "model"])
def test_no_copy_for_a_slice_waits_for_the_backward(
    stream_from_host: StreamFromHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients accumulated over two batches are bit-identical to those with a copy for each slice."""
    model, weights = build("llama")
    batches = BATCH, make_batch(2, 40)
    with EngineUnderTest(model, slice_tokens=12, stream_from_host=stream_from_host, check_slices=False) as under_test:
        under_test.profile_step(BATCH, amp=True)
        under_test.load(0.5)

        def accumulate(copies_of_a_weight: int) -> Step:
            model.zero_grad()
            for batch in batches:
                with CopiesOf(weights) as copies:
                    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                        loss = model(**batch).loss
                    assert len(copies.made) == 4 * len(weights)  # one for each slice
                    assert copies.alive == copies_of_a_weight * len(weights)
                    loss.backward()
                assert copies.alive == 0
            return Step(loss.detach().clone(), gradients_of(model))

        made_again = accumulate(copies_of_a_weight=0)
        monkeypatch.setattr(WeightCopies, "find_trained", lambda copies, t: None)
        kept = accumulate(copies_of_a_weight=4)
    assert_equal(made_again, kept)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("family", FEW)
def test_a_copy_of_a_weight_is_not_taken_for_an_activation(family: str, frozen: bool) -> None:
    model, weights = build(family, frozen)
    copies = {2 * weight.numel() for weight in weights}
    with EngineUnderTest(model) as under_test:
        under_test.profile_step(make_batch(2, 47), amp=True)  # no activation has the size of a weight
        assert under_test.profile is not None
        saved = [item for call in under_test.profile.in_order() for item in call.saved]
    assert saved and all(item.per_token and item.size_bytes not in copies for item in saved)


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_plain_training_keeps_a_copy_of_each(frozen: bool) -> None:
    """Without the engine the copies stay alive, so the test above can fail."""
    model, weights = build("llama", frozen)
    with CopiesOf(weights) as copies, torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = model(**BATCH).loss
        assert copies.alive == len(weights)
    del loss


def _write(weight: nn.Parameter) -> None:
    weight.mul_(2)


def _replace(weight: nn.Parameter) -> None:
    weight.data = weight.data * 2


@pytest.mark.parametrize("change", [_write, _replace])
def test_a_weight_that_changed_since_is_refused(change: Callable[[nn.Parameter], None]) -> None:
    model, weights = build("llama")
    with EngineUnderTest(model) as under_test:
        under_test.profile_step(BATCH, amp=True)
        under_test.load(1.0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**BATCH).loss
        with torch.no_grad():
            change(weights[0])
        with pytest.raises(RuntimeError, match="a weight that the backward needs was changed after the forward"):
            loss.backward()
        del loss
