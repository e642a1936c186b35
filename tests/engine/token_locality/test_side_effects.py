"""Layers that write or keep something besides what they return, as in plain training."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.architectures.acting_blocks import block_that, home
from support.attention.recorded_training import Recording, blocks, compare
from support.families import FAMILIES, PlainBlock, make_batch
from support.markers.slow import slow_if
from support.trainer_harness import batches, fit
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from typing_extensions import override

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

LOSSES: list[Tensor] = []


@pytest.fixture(autouse=True)
def _empty() -> None:
    LOSSES.clear()


# ---- what is as in plain training


def counter(block: Any) -> None:
    block.count, block.counts = torch.zeros(()), {"all": [torch.zeros(2)]}
    block.norm = [nn.BatchNorm1d(32)]  # of which it owns no parameters


def counts(block: Any, x: Tensor) -> Tensor:
    block.count += 1
    return x * (1 + block.count / 10)


def counts_unseen(block: Any, x: Tensor) -> Tensor:
    block.count.data += 1
    return x * (1 + block.count / 10)


def counts_inside(block: Any, x: Tensor) -> Tensor:
    block.counts["all"][0][1] += 1
    return x * (1 + block.counts["all"][0][1] / 10)


def averages_elsewhere(block: Any, x: Tensor) -> Tensor:
    before = block.norm[0].running_mean.clone()
    block.norm[0](x.detach().flatten(0, 1))
    return x * (1 + before)


def adds_to_a_buffer_of_the_argument(block: Any, x: Tensor) -> Tensor:
    block.store[0].running_mean.data.add_(1)
    return x * (1 + block.store[0].running_mean / 10)


def keeps_in_the_argument(block: Any, x: Tensor) -> Tensor:
    return keeps_in(block.store[0], x)


def keeps_in_the_parent(block: Any, x: Tensor) -> Tensor:
    return keeps_in(block.home[0], x)


def keeps_in_a_config(block: Any, x: Tensor) -> Tensor:
    return keeps_in(block.config, x)


def keeps_in(place: Any, x: Tensor) -> Tensor:
    """Adds to what earlier layers have left, which is read as well."""
    before, mean = place.aux, x.mean(1, keepdim=True)
    place.aux = mean if before is None else before + mean
    return x if before is None else x + before


def relates_and_keeps_tokens(block: Any, x: Tensor) -> None:
    hidden = ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    block.home[0].aux = (x @ x.transpose(1, 2)).masked_fill(hidden, float("-inf")).softmax(-1) @ x


WHOLE: dict[Callable[[Any, Tensor], Tensor | None], str] = {
    counts: "writes to Acting.count",
    counts_unseen: "writes to Acting.count",
    counts_inside: "writes to Acting.counts",
    averages_elsewhere: "aten.var_mean computes along the tokens",
    adds_to_a_buffer_of_the_argument: "writes to BatchNorm1d.running_mean",
    keeps_in_the_argument: "aten.mean computes along the tokens",
    keeps_in_the_parent: "aten.mean computes along the tokens",
    keeps_in_a_config: "aten.mean computes along the tokens",
    relates_and_keeps_tokens: "aten.arange makes a tensor by the number of tokens",
}


@slow_if(lambda alpha, blind: blind or alpha != 0.5)
@pytest.mark.parametrize("blind", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize(("acts", "why"), WHOLE.items())
def test_layers_that_run_whole(acts: Callable[..., Any], why: str, alpha: float, blind: bool) -> None:
    said = "aten.all computes along the tokens" if blind else why
    kind = block_that(acts, counter, blind)
    if alpha == 0.0:
        compare(home(kind), {"alpha": alpha})
        return
    with pytest.warns(UserWarning, match=f"layers run as one slice.*{said}"):
        compare(home(kind), {"alpha": alpha})


class Bounded(PlainBlock):
    """Keeps a weight within bounds, as layers of Gemma 3n do."""

    def forward(self, x: Tensor) -> Tensor:
        self.out.weight.data.clamp_(-0.05, 0.05)
        return super().forward(x)


@pytest.mark.filterwarnings("error:.*as one slice")
@pytest.mark.parametrize("settings", [{"alpha": 0.0}, {"alpha": 0.5, "slice_tokens": 8, "stream_from_host": "hidden"}])
def test_weights_that_are_kept_within_bounds(settings: dict[str, Any]) -> None:
    """The layers are cut."""
    compare(blocks(Bounded), settings)


# ---- what a layer may do that does not matter


def computes_in_place(block: Any, x: Tensor) -> Tensor:
    rows = torch.from_numpy(np.ones(32, dtype=np.float32))
    rows.mul_(0.5)
    total = torch.zeros_like(x)
    total.data += x
    weight = block.out.weight.detach().clone()
    weight.mul_(2)
    weight.data = weight / 2
    return torch.add(total, x @ weight) * rows


def casts_a_weight(block: Any, x: Tensor) -> Tensor:
    """As routers of transformers do, in each forward."""
    block.out = block.out.to(torch.float32)
    return x


@pytest.mark.filterwarnings("error:.*as one slice")
def test_casts_to_the_same_dtype_do_not_matter() -> None:
    compare(blocks(block_that(casts_a_weight)), {"alpha": 0.5})


@pytest.mark.filterwarnings("error:.*as one slice")
def test_tensors_that_a_layer_has_made_are_its_own() -> None:
    compare(blocks(block_that(computes_in_place)), {"alpha": 0.5})


def sends(block: Any, x: Tensor) -> None:
    if not isinstance(x, FakeTensor):
        threading.Thread(target=lambda sent: time.sleep(0.3), args=[x * 2]).start()


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*as one slice")
def test_tensors_that_another_thread_still_sends_are_not_kept() -> None:
    """Process groups hold what a collective has sent until a thread of theirs has seen that it ended."""
    compare(blocks(block_that(sends)), {"alpha": 0.5})


class Hooked(Recording):
    """Saves what autograd saves on the host."""

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().loss(batch)


@pytest.mark.filterwarnings("error:.*as one slice")
@pytest.mark.parametrize("family", ["llama", "block"])
def test_hooks_that_keep_what_autograd_saves(family: str) -> None:
    compare(FAMILIES[family].build, {"alpha": 0.5, "loss_chunk_tokens": 8}, Hooked)


def test_hooks_that_keep_tensors_are_called_once() -> None:
    """They are the user's, and not called when a layer is probed."""
    run = Recording(blocks(PlainBlock))
    for block in run.model.blocks:
        block.mlp.register_forward_hook(lambda mlp, _, y: LOSSES.append(y.detach().mean()))
    fit(MemoStrategy(alpha=1.0), run, batches([make_batch(2, 24)]), max_steps=1)
    assert len(LOSSES) == 3
