"""Layers that compute with functions of their weights: a recomputation saves the same tensors in the same order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention.recorded_training import blocks, compare
from support.families import PlainBlock
from support.markers.slow import slow_if
from support.modes import BY_KIND
from torch import Tensor, nn
from torch.func import functional_call

from lightning_memo.engine.forward.repeated_choices import NotedChoices
from lightning_memo.engine.saved_tensors.call_arguments import NonActivations

pytestmark = pytest.mark.usefixtures("own_folder")

SETTINGS = {
    "0": {"alpha": 0.0},
    "half": {"alpha": 0.5},
    "1": {"alpha": 1.0},
    "slices": {"slice_tokens": 16},
    "all": {"slice_tokens": 16, "stream_from_host": "hidden"},
    "kinds": {"test_mode": BY_KIND, "device_memory": "64KiB", "host_memory": "1GiB"},
}


def block(compute: Callable[[PlainBlock, Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Return a function that builds a model whose blocks add something that they compute."""

    class Adding(PlainBlock):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + compute(self, x)

    return blocks(Adding)


def most(weight: Tensor) -> Tensor:
    """Return a weight without its smaller half."""
    least = weight.abs().flatten().topk(weight.numel() // 2).values.min()
    return weight * (weight.abs() >= least)


CHOOSING = {
    "topk": lambda self, x: x @ self.out.weight.topk(32, 0).values * 0.1,
    "sort": lambda self, x: x @ self.out.weight.sort(0).values * 0.1,
    "max": lambda self, x: F.linear(x, self.out.weight * self.out.weight.max(0).values),
    "min": lambda self, x: F.linear(x, self.out.weight * self.out.weight.min(0).values),
    "norm": lambda self, x: F.linear(x, self.out.weight / self.out.weight.abs().max(0, keepdim=True).values),
    "mask": lambda self, x: F.linear(x, most(self.out.weight)),
    "product": lambda self, x: F.linear(x, (self.out.weight * self.qkv.weight[:32]).sort(0).values),
}
CALLING = {
    "doubled": lambda self, x: functional_call(self.mlp, {k: 2 * v for k, v in self.mlp.named_parameters()}, x),
    "square": lambda self, x: functional_call(self.out, {k: 2 * v for k, v in self.out.named_parameters()}, x),
    "low_rank": lambda self, x: F.linear(
        x, self.out.weight + self.mlp[2].weight @ self.mlp[0].weight * 0.1, self.out.bias
    ),
    "sparse": lambda self, x: torch.mm(self.out.weight.to_sparse_csr(), x.reshape(-1, 32).t()).t().reshape(x.shape),
}


@slow_if(lambda case_id: not case_id.endswith("-all") and case_id != "topk-half")
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("compute", CHOOSING.values(), ids=CHOOSING)
def test_choices_among_weights(compute: Any, settings: dict[str, Any]) -> None:
    compare(block(compute), settings)


def test_a_choice_among_weights_keeps_no_indices() -> None:
    layer, x, noted = nn.Linear(8, 8), torch.randn(2, 8), list[Tensor]()
    with NotedChoices(noted.append, NonActivations(layer, (), x)):
        layer.weight.abs().sort(0)
        assert not noted
        layer(x).sort(0)
    assert len(noted) == 1


@slow_if(lambda compute, settings: settings != SETTINGS["all"] and compute is not CALLING["low_rank"])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("compute", CALLING.values(), ids=CALLING)
def test_functions_of_weights(compute: Any, settings: dict[str, Any]) -> None:
    """The input of a slice is a part of several rows, of which operations make copies in another order."""
    compare(block(compute), settings)


class Narrower(PlainBlock):
    """Computes with fewer tokens in the backward than in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if torch._C._current_graph_task_id() == -1 else x[:, :-1])


def test_other_shapes_are_refused_in_every_step() -> None:
    message = r"Narrower saved a torch.float32 tensor of shape \[2, 47, 32\] when it was recomputed and a torch.float32"
    for checked in (True, False):
        with pytest.raises(RuntimeError, match=message):
            compare(blocks(Narrower), {"alpha": 0.0, "check_slices": checked})
