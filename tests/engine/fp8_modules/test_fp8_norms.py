"""TransformerEngine's own norms in layers: they have no FP8 scales, and act on each token alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.architectures.fp8_models import (
    EngineBlock,
    InFp8,
    blocks_of,
    engine,
    line_of,
    recipe_of,
    scales_in,
    strategy,
    trained,
)
from support.families import VOCABULARY, PlainBlock, make_batch
from support.harness import EngineUnderTest, assert_equal, loss_and_gradients, on_device
from torch import Tensor, nn

pytestmark = [pytest.mark.usefixtures("own_folder")]

# Gradients of weights are summed in another order: values of 24 bits, or, with autocast, of 8.
ROUNDED = {False: 1e-6, True: 2**-8}


class _NormedBlock(EngineBlock):
    """A block in which a norm comes first, and another one lies between modules in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.between = engine().RMSNorm(32), engine().LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.between(super().forward(self.first(x))))


class _NormsOnly(PlainBlock):
    """A block whose norms are TransformerEngine's, and all else PyTorch's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = engine().RMSNorm(32), engine().LayerNorm(32)


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("recipe", ["delayed", "unfused", "current", "mxfp8", "blocks"])
def test_norms_beside_modules_in_fp8(te: Any, recipe: str, alpha: float) -> None:
    """The first norm is the first module of the autocast, whose backward updates the histories of all."""
    build = lambda: InFp8(recipe_of(recipe), lambda: blocks_of(_NormedBlock))  # noqa: E731
    _, expected = trained(None, build(), max_steps=4)
    result, found = trained(strategy(alpha=alpha), build(), max_steps=4)
    assert (len(result.plan.swap.storage.calls) == 2) is (alpha == 0.5)
    compare(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_layers_with_its_norms_only_are_cut(te: Any, alpha: float, amp: bool) -> None:
    torch.manual_seed(0)
    model, batch = on_device(blocks_of(_NormsOnly)), make_batch(2, 32)
    plain = loss_and_gradients(model, batch, amp)
    with EngineUnderTest(model) as whole:
        whole.profile_step(batch, amp)
        whole.load(alpha)
        assert not whole.engine.layer_classes.unsliceable
        if alpha != 0.5:  # one slice
            assert_equal(whole.step(batch, amp), plain)
        else:
            assert whole.step(batch, amp).distance(plain) < ROUNDED[amp]
    with EngineUnderTest(model, slice_tokens=8) as sliced:
        sliced.profile_step(batch, amp)
        sliced.load(alpha)
        assert sliced.step(batch, amp).distance(plain) < ROUNDED[amp]


def _with_head_in_fp8() -> nn.Module:
    model = blocks_of(_NormsOnly)
    model.head = engine().Linear(32, VOCABULARY)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_slices_update_the_histories_once(te: Any, alpha: float) -> None:
    """The first norm is the first module of the autocast, also if it runs slice by slice, twice."""
    _, expected = trained(None, InFp8(recipe_of("unfused"), _with_head_in_fp8), max_steps=3)
    result, found = trained(strategy(alpha=alpha), InFp8(recipe_of("unfused"), _with_head_in_fp8), max_steps=3)
    assert len(result.plan.swap.storage.calls) == 1
    scales = list(scales_in(result.module))
    assert len(scales) == 4 and all(map(torch.Tensor.any, scales))
    for a, b in zip(found[-len(scales) :], expected[-len(scales) :], strict=True):
        assert torch.equal(a != 0, b != 0)
    if alpha != 0.5:
        compare(found, expected)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)  # losses


class _Mixing:
    """Adds the mean of all tokens, which a norm does not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(1, keepdim=True))  # type: ignore[misc]


def _mixing(replaced: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        block = _NormsOnly()
        if replaced == "class":
            block.norm1 = type("Own", (_Mixing, type(block.norm1)), {"__module__": __name__})(32)
        else:
            own = block.norm1.forward
            block.norm1.forward = lambda x: own(x + x.mean(1, keepdim=True))
        return block

    return build


@pytest.mark.parametrize("replaced", ["class", "attribute"])
def test_forwards_of_users_are_not_taken_for_norms(te: Any, replaced: str) -> None:
    _, expected = trained(None, InFp8(None, lambda: blocks_of(_mixing(replaced))), max_steps=3)
    module = InFp8(None, lambda: blocks_of(_mixing(replaced)))
    result, found = trained(strategy(alpha=0.5), module, max_steps=3)
    assert len(result.plan.swap.storage.calls) == 2
    compare(found, expected)


def test_norms_in_fp8_are_refused_beside_settings(te: Any) -> None:
    """In its autocast, they have a part in its state."""
    line = line_of(InFp8(recipe_of("current"), lambda: blocks_of(_NormsOnly)), slice_tokens=16)
    assert line.startswith("RMSNorm is TransformerEngine's and runs in its FP8 autocast, which is not supported with")
