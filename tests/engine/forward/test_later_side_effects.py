"""Layers that begin to do something in a later step, when they have been probed already."""

from __future__ import annotations

from typing import Any

import pytest
from support.attention.recorded_training import Recording, blocks, compare
from support.devices import DEVICE
from support.families import PlainBlock, PlainModel
from support.trainer_harness import LanguageModel, fit, loader
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput
from typing_extensions import override

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

ON_CPU = pytest.mark.skipif(DEVICE.type != "cpu", reason="NumPy writes into tensors on the CPU only")


class Counting(LanguageModel):
    """Counts steps in `Counting.step`, which layers read."""

    step = 0

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        Counting.step = batch_idx


LOSSES: list[Tensor] = []


class Keeping(PlainBlock):
    """Adds a loss to a list from the third step on."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if Counting.step >= 2:
            LOSSES.append(y.pow(2).mean())
        return y


class WithLosses(PlainModel):
    """Adds to its loss what layers have kept."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
        out = super().forward(input_ids, labels)
        out.loss = out.loss + sum(LOSSES)
        LOSSES.clear()
        return out


def test_losses_that_a_layer_begins_to_keep_elsewhere() -> None:
    with pytest.raises(ValueError, match="the loss depends on tensors of an earlier forward") as caught:
        fit(MemoStrategy(alpha=0.5), Counting(lambda: WithLosses([Keeping() for _ in range(3)])), loader(), max_steps=6)
    assert "\n" not in str(caught.value)
    assert "second time" in str(caught.value.__cause__)


class Gated(PlainBlock):
    """Computes a product with a gate, and writes into the gate later."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        gate = h.sigmoid()
        y = h * gate
        self.write(gate)
        return super().forward(x + y)

    def write(self, gate: Tensor) -> None:
        if Counting.step >= 2:
            gate.data.zero_()


class Numpy(Gated):
    def write(self, gate: Tensor) -> None:
        gate.detach().numpy()[:] *= 0.5


class Noticed(Gated):
    def write(self, gate: Tensor) -> None:
        gate.clone().data.zero_()
        gate.detach().cpu().numpy().sum()


class Harmless(Recording, Counting):
    pass


@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.parametrize("kind", [Gated, pytest.param(Numpy, marks=ON_CPU)])
def test_writes_that_the_probe_does_not_see(kind: type[nn.Module], alpha: float) -> None:
    """They are found in a step that is checked: of the quarter of what a call saves, each call has another one."""
    module = Counting(lambda: PlainModel([kind() for _ in range(6)]))
    with pytest.raises(ValueError, match=f"{kind.__name__} writes through .data into its input, or into") as caught:
        fit(MemoStrategy(alpha=alpha), module, loader(), max_steps=5)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_what_is_not_written_is_not_refused(alpha: float) -> None:
    compare(blocks(Noticed), {"alpha": alpha}, Harmless, steps=5)
