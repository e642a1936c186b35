"""Buffers that a forward writes and that autograd saves, and layers that begin to write them in a later step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attention.recorded_training import Recording, blocks, compare
from support.families import PlainBlock
from support.markers.slow import slow_if
from torch import Tensor, nn
from typing_extensions import override

pytestmark = pytest.mark.usefixtures("own_folder")

STEP = [0]


class Stepping(Recording):
    """Counts steps in `STEP`."""

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        STEP[0] = batch_idx


class Written(PlainBlock):
    """Multiplies by a buffer that it writes from some step on."""

    first = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if STEP[0] >= self.first:
            self.write(x)
        return super().forward(x * self.history)

    def write(self, x: Tensor) -> None:
        self.history += 0.1


class Twice(Written):
    """Has another module that holds the same buffer, and a list that does."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Module()
        self.other.register_buffer("same", self.history)
        self.held = [self.history]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.other.same + self.held[0]


class Bounded(Written):
    """Writes what its buffer holds already."""

    def write(self, x: Tensor) -> None:
        self.history.clamp_(0, 2)


class Mean(Written):
    """Its buffer is a mean over all tokens."""

    def write(self, x: Tensor) -> None:
        self.history = 0.9 * self.history + x.detach().mean().abs()


class Queue(Written):
    """Writes a part of a buffer that is too large for a copy in each recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4096, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (1 + self.queue[: x.shape[1]].clone())

    def write(self, x: Tensor) -> None:
        self.queue[: x.shape[1]].lerp_(x.detach().mean(0), 0.5)


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.filterwarnings("ignore:.*layers run as one slice")
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", [Written, Twice, Bounded, Mean, Queue])
def test_buffers_that_autograd_saves(kind: type[Written], alpha: float) -> None:
    compare(blocks(kind), {"alpha": alpha})


LINE = "writes into its buffer history, which it did not in its first forward, and each slice would do it again: let it"


@pytest.mark.slow
@pytest.mark.parametrize("first", [2, 4])
@pytest.mark.parametrize("kind", [Written, Mean])
def test_layers_that_begin_to_write(kind: type[Written], first: int) -> None:
    """The first call that writes in slices ends the run."""
    later = type(f"Later{kind.__name__}", (kind,), {"first": first, "__module__": __name__})
    with pytest.raises(ValueError, match=LINE) as caught:
        compare(blocks(later), {"alpha": 0.5}, Stepping, steps=6)
    assert "\n" not in str(caught.value)
    for alpha in (0.0, 1.0):
        compare(blocks(later), {"alpha": alpha}, Stepping, steps=6)


@pytest.mark.parametrize("kind", [Written, Mean])
def test_layers_that_begin_to_write_in_a_step_that_compares_them(kind: type[Written]) -> None:
    """The eighth step compares the first layer before it runs in slices, so that all layers of the step run whole."""
    later = type(f"Later{kind.__name__}", (kind,), {"first": 7, "__module__": __name__})
    with pytest.warns(UserWarning, match="it writes to .*history.*From now on, layers run as one slice"):
        compare(blocks(later), {"alpha": 0.5}, Stepping, steps=10)
