"""Constants that layers make once, and keep outside of modules: the proof leaves values there, not fake tensors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from support.attention.recorded_training import blocks, compare
from support.families import FAMILIES, VOCABULARY, PlainBlock
from support.markers.slow import slow_if
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

pytestmark = pytest.mark.usefixtures("own_folder")

KEPT: dict[object, Tensor] = {}
OBJECT = SimpleNamespace(slopes=None)


@functools.lru_cache
def slopes(width: int) -> Tensor:
    return torch.tensor([2.0 ** (-4 * n / width) for n in range(width)])


def of_lru_cache(block: PlainBlock) -> Tensor:
    return slopes(32)


def of_dict(block: PlainBlock) -> Tensor:
    if 32 not in KEPT:
        made = torch.ones(2, 32)
        made[1].mul_(0.5)
        KEPT[32] = 1 / (10 ** (torch.arange(32) / 32)) + made[1:].sum(0)
    return KEPT[32]


def of_class(block: PlainBlock) -> Tensor:
    if "scale" not in vars(type(block)):
        type(block).scale = torch.linspace(0.5, 1.5, 32)  # type: ignore[assignment]
    return type(block).scale  # type: ignore[return-value]


def of_object(block: PlainBlock) -> Tensor:
    if OBJECT.slopes is None:
        OBJECT.slopes = torch.linspace(0.5, 1.5, 32)
    return OBJECT.slopes  # type: ignore[no-any-return]


def of_buffer(block: PlainBlock) -> Tensor:
    if "buffer" not in KEPT:
        KEPT["buffer"] = block.rates.cos()  # type: ignore[operator, union-attr]
    return KEPT["buffer"]


def scaling(constant: Callable[[PlainBlock], Tensor]) -> type[PlainBlock]:
    class Scaling(PlainBlock):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rates", torch.linspace(0, 1, 32))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * constant(self))

    return Scaling


def forget() -> None:
    KEPT.clear()
    slopes.cache_clear()
    OBJECT.slopes = None


@slow_if(lambda case_id: case_id in ("of_buffer", "of_object"))
@pytest.mark.filterwarnings("error:.*as one slice")
@pytest.mark.parametrize("constant", [of_lru_cache, of_dict, of_object, of_buffer, of_class])
def test_constants_that_the_first_layer_makes(constant: Callable[[PlainBlock], Tensor]) -> None:
    """The layers are cut: nothing in them relates tokens."""

    def build() -> nn.Module:
        forget()
        return blocks(scaling(constant))()

    compare(build, {"alpha": 0.5, "slice_tokens": 8, "stream_from_host": "hidden"})
    kept = [*KEPT.values(), *filter(torch.is_tensor, [OBJECT.slopes]), slopes(32)]
    assert not any(isinstance(t, FakeTensor) for t in kept)
    forget()


class HeldByThread(PlainBlock):
    """Its output is held for a while by another thread, as a graph is by that in which a GPU's backward has run."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if isinstance(y, FakeTensor):
            threading.Timer(0.05, id, (y,)).start()
        return y


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*as one slice")
def test_what_a_thread_is_about_to_let_go_of_is_not_kept() -> None:
    compare(blocks(HeldByThread), {"alpha": 0.5, "slice_tokens": 8})


class Scaled(nn.Linear):
    """A head that scales by a constant that it makes in its first forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * slopes(32))


def test_constants_that_a_head_makes() -> None:
    """Its logits are computed in chunks."""

    def build() -> nn.Module:
        forget()
        model = FAMILIES["llama"].build()
        model.lm_head = Scaled(32, VOCABULARY, bias=False)  # type: ignore[assignment]
        return model

    compare(build, {"alpha": 0.5, "loss_chunk_tokens": 8})
    assert type(slopes(32)) is Tensor
    forget()


@pytest.mark.slow
def test_constants_that_something_fake_was_written_to_are_refused() -> None:
    def last(block: PlainBlock) -> Tensor:
        KEPT["last"] = torch.zeros(32).copy_(block.out.bias)
        return KEPT["last"]

    with pytest.raises(ValueError, match="Scaling keeps tensors outside of its modules"):
        compare(blocks(scaling(last)), {"alpha": 0.5})
    forget()
