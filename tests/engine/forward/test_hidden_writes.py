"""Layers that write through `.data` into tensors that autograd has saved are refused; other uses of it are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention.recorded_training import blocks, compare
from support.families import PlainBlock
from support.markers.slow import slow_if
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("own_folder")

SETTINGS: list[dict[str, Any]] = [
    *({"alpha": alpha} for alpha in (0.0, 0.5, 1.0)),
    {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "hidden"},
]


class Writing(PlainBlock):
    """Computes a product with a function of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.weight = nn.Linear(32, 32), nn.Parameter(torch.linspace(0.5, 1.5, 32))


class Saved(Writing):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.inner(x))
        y = h * self.weight
        h.data.mul_(0.5)
        return super().forward(x + y)


class SavedPart(Writing):
    """Writes into a half of a saved tensor, by an operator with `out=`."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        h = self.inner(x)
        y = h[..., :16] * self.weight[:16]
        torch.neg(h.data, out=h.data)
        return x + F.pad(y, (0, 16))


class Input(Writing):
    def forward(self, x: Tensor) -> Tensor:
        x.data.mul_(0.9)
        return super().forward(x)


class Keys(Writing):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        k.data.zero_()
        return x + self.out(y)


@pytest.mark.parametrize("kind", [Saved, SavedPart, Input, Keys])
def test_writes_that_autograd_does_not_notice(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} writes through .data into its input, or into") as caught:
        compare(blocks(kind), {"alpha": 1.0})
    assert "\n" not in str(caught.value)


class Before(Writing):
    """Writes before anything is saved."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        h.data.clamp_(max=0.5)
        return super().forward(x + h * self.weight)


class OtherPart(Writing):
    """Writes into the half that nothing needs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).movedim(-1, 0).contiguous()
        y = h[:16].sin()
        h[16:].data.zero_()
        return super().forward(x + F.pad(y.movedim(0, -1), (0, 16)))


class OtherColumns(Writing):
    """Writes into the columns that nothing needs."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        y = h[..., :16].sin()
        h[..., 16:].data.zero_()
        return super().forward(x + F.pad(y, (0, 16)))


class Recurrent(Writing):
    """PyTorch's GRU changes some of the columns that it computes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(32, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.recurrent(x)[0])


class Noticed(Writing):
    """Changes in place what nothing has saved, and what the operator itself saves afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x) + 1
        h += 0.5
        return super().forward(x + F.relu(h, inplace=True) * self.weight)


@slow_if(lambda case_id: not case_id.endswith("{'alpha': 0.5}"))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", [Before, OtherPart, OtherColumns, Noticed])
def test_other_writes(kind: Callable[[], nn.Module], settings: dict[str, Any]) -> None:
    compare(blocks(kind), settings)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_recurrent_layers(alpha: float) -> None:
    compare(blocks(Recurrent), {"alpha": alpha})
