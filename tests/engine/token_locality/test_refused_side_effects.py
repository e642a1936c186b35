"""Layers that write or keep something where it cannot be undone are refused in one line, before they do so."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.architectures.acting_blocks import block_that, home
from support.attention.recorded_training import Recording, blocks
from support.families import PlainModel, make_batch
from support.markers.slow import slow_if
from support.trainer_harness import batches, fit
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

LOSSES: list[Tensor] = []
OUTSIDE = torch.zeros(())


@pytest.fixture(autouse=True)
def _empty() -> None:
    LOSSES.clear()
    OUTSIDE.zero_()


def appends(block: Any, x: Tensor) -> None:
    LOSSES.append(block.out(x).square().mean())


def appends_detached(block: Any, x: Tensor) -> None:
    LOSSES.append(x.detach().mean())


def appends_tokens(block: Any, x: Tensor) -> None:
    LOSSES.append(x * 2)


def keeps_in_slots(block: Any, x: Tensor) -> None:
    block.slots.aux = x.mean(1)


def keeps_in_the_class(block: Any, x: Tensor) -> None:
    type(block).aux = x * 2  # type: ignore[attr-defined]


def scales_its_weight(block: Any, x: Tensor) -> None:
    block.out.weight.data.mul_(0.9)


def scales_a_row(block: Any, x: Tensor) -> None:
    with torch.no_grad():
        block.out.weight[0] *= 0.9


def scales_weights_together(block: Any, x: Tensor) -> None:
    torch._foreach_mul_([block.out.bias.data, block.out.weight.data], 0.9)


def normalizes_its_weight(block: Any, x: Tensor) -> None:
    block.out.weight.data = block.out.weight.data / block.out.weight.data.norm(dim=0)


def catches(block: Any, x: Tensor) -> None:
    try:
        block.out.weight.data.mul_(0.9)
    except Exception:
        return


def counts_outside(block: Any, x: Tensor) -> None:
    OUTSIDE.add_(1)


def counts_in_a_tuple(block: Any, x: Tensor) -> None:
    block.fixed[0].add_(1)


def counts_in_a_large_tensor(block: Any, x: Tensor) -> None:
    block.large[0] += 1


def counts_in_a_view(block: Any, x: Tensor) -> None:
    block.part += 1


def table(block: Any) -> None:
    block.fixed, block.large = (torch.zeros(()),), torch.zeros(2**16 + 1)
    block.whole = torch.zeros(2)
    block.part = block.whole[:1]


KEEPS = "Acting keeps tensors outside of its modules, arguments and return value"
WRITES = "Acting writes into its weight out.weight, and a recomputation would write again"
REFUSED: dict[Callable[[Any, Tensor], None], str] = {
    appends: KEEPS,
    appends_detached: KEEPS,
    appends_tokens: KEEPS,
    keeps_in_slots: KEEPS,
    keeps_in_the_class: KEEPS,
    scales_its_weight: WRITES,
    scales_a_row: WRITES,
    scales_weights_together: "writes into its weight out.bias",
    normalizes_its_weight: WRITES,
    catches: WRITES,
    counts_outside: "Acting writes into a tensor outside of its modules and arguments",
    counts_in_a_tuple: "Acting writes into Acting.fixed, which is no buffer",
    counts_in_a_large_tensor: "Acting writes into Acting.large, which is no buffer",
    counts_in_a_view: "Acting writes into Acting.whole, which is no buffer",
}


@slow_if(lambda blind: blind)
@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize(("acts", "message"), REFUSED.items())
def test_what_cannot_be_undone_is_refused(acts: Callable[..., Any], message: str, blind: bool) -> None:
    """Weights and tensors outside are as before."""
    run = Recording(home(block_that(acts, table, blind)))
    before = {name: p.detach().clone() for name, p in run.named_parameters()}
    with pytest.raises(ValueError, match=message) as caught:
        fit(MemoStrategy(alpha=0.5), run, batches([make_batch(2, 24)]), max_steps=1)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(p, before[name]) for name, p in run.named_parameters())
    assert OUTSIDE == 0 and all(block.fixed[0] == block.large[0] == block.part[0] == 0 for block in run.model.blocks)


def appends_loss_of_weights(block: Any, x: Tensor) -> None:
    LOSSES.append(block.out.weight.square().mean())


@pytest.mark.slow
def test_losses_of_weights_are_refused() -> None:
    """They depend on no input."""
    with pytest.raises(ValueError, match=KEEPS):
        fit(MemoStrategy(), Recording(blocks(block_that(appends_loss_of_weights))), batches([make_batch(2, 24)]))


class Writing(PlainModel):
    """Its layers change an argument in a way that PyTorch does not count."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:  # type: ignore[override]
        x, spent = self.embed(input_ids), torch.zeros(1)
        for block in self.blocks:
            x = block(x, spent)
        return CausalLMOutput(loss=x.square().mean())


def spends(block: Any, x: Tensor) -> None:
    block.store[0].data.add_(1)


def test_arguments_that_are_changed_unseen_are_refused() -> None:
    kind = block_that(spends)
    run = Recording(lambda: Writing([kind() for _ in range(3)]))
    with pytest.raises(ValueError, match="Acting writes into a tensor that it gets as an argument"):
        fit(MemoStrategy(alpha=0.0), run, batches([make_batch(2, 24)]), max_steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(("acts", "message"), [(scales_its_weight, WRITES), (appends, KEEPS)])
def test_a_single_layer_that_does_so_is_found(acts: Callable[..., Any], message: str) -> None:
    """Other layers of its class are probed in its place."""
    numbers = itertools.count()

    def number(block: Any) -> None:
        block.number = next(numbers)

    def acts_in_one(block: Any, x: Tensor) -> Tensor:
        x = x + x.mean(1, keepdim=True)
        if block.number == 2:
            acts(block, x)
        return x

    with pytest.raises(ValueError, match=message):
        fit(MemoStrategy(), Recording(blocks(block_that(acts_in_one, number))), batches([make_batch(2, 24)]))
