"""Layers that draw random numbers from other generators than torch's default ones have plain training's gradients."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.attention.recorded_training import Recording, compare
from support.families import VOCABULARY, PlainBlock, PlainModel
from support.markers.slow import slow_if
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from lightning_memo.engine.state.random_states import OtherGenerators

pytestmark = pytest.mark.usefixtures("own_folder")

ALPHAS = [0.0, 0.5, 1.0]
SLICES = {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "hidden"}


class Drawn(Recording):
    """Trains from fixed states of all generators, and notes where those of the process end."""

    ends: list[Any] = []  # noqa: RUF012

    def on_train_start(self) -> None:
        super().on_train_start()
        random.seed(7)
        np.random.seed(7)

    def on_train_end(self) -> None:
        self.ends.append((random.random(), np.random.random()))


def assert_like_plain(build: Callable[[], nn.Module], settings: dict[str, Any]) -> None:
    Drawn.ends.clear()
    compare(build, settings, Drawn)
    assert Drawn.ends[0] == Drawn.ends[1]


class Generators(PlainBlock):
    def __init__(self, index: int, draw: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.index, self.draw = index, draw
        self.of_torch, self.of_python = torch.Generator().manual_seed(index), random.Random(index)
        self.of_numpy = {"inside": np.random.default_rng(index)}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.draw(self, x))


class Dropped(Generators):
    """Drops the layer, more often in deeper layers; the first one never draws."""

    def forward(self, x: Tensor) -> Tensor:
        dropped = self.index and self.draw(self, x) < 0.3 * self.index
        return x if dropped else PlainBlock.forward(self, x)


def drawing(kind: type[Generators], draw: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: PlainModel([kind(index, draw) for index in range(3)])


DRAWS: dict[str, Callable[[], nn.Module]] = {
    "python": drawing(Dropped, lambda layer, x: random.random()),
    "numpy": drawing(Dropped, lambda layer, x: np.random.random()),
    "own torch": drawing(Dropped, lambda layer, x: torch.rand((), generator=layer.of_torch)),
    "own python": drawing(Dropped, lambda layer, x: layer.of_python.random()),
    "own numpy": drawing(Generators, lambda layer, x: layer.of_numpy["inside"].random()),
    "each token": drawing(Generators, lambda layer, x: torch.empty_like(x).normal_(generator=layer.of_torch)),
}


@slow_if(lambda alpha: alpha != 0.0)
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("draws", DRAWS)
def test_layers_that_run_whole(draws: str, alpha: float) -> None:
    told = pytest.warns(UserWarning, match=r"draws numbers of|draws random numbers for each|a trial run with other")
    with told if alpha == 0.5 else nullcontext():
        assert_like_plain(DRAWS[draws], {"alpha": alpha})


class GivesGenerator(PlainModel):
    """Gives its layers a generator."""

    def __init__(self, blocks: Any) -> None:
        super().__init__(blocks)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, self.generator)
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


class Gated(PlainBlock):
    """Draws one number for all tokens, before attention and behind it."""

    causal = True

    def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
        x = x * (1 + torch.rand((), generator=generator))
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2)
        return x + self.out(y) * (1 + torch.rand((), generator=generator))


class GatedNest(Gated):
    """Its slices are nested."""

    causal = False


@slow_if(lambda settings: settings["alpha"] == 1.0)
@pytest.mark.parametrize(
    ("kind", "settings"),
    [*((kind, {"alpha": alpha}) for kind in (Gated, GatedNest) for alpha in ALPHAS), (Gated, SLICES)],
    ids=str,
)
@pytest.mark.filterwarnings("error:.*layers run as one slice")
def test_one_number_for_all_slices(kind: type[nn.Module], settings: dict[str, Any]) -> None:
    assert_like_plain(lambda: GivesGenerator([kind() for _ in range(3)]), settings)


def test_settings_that_need_slices() -> None:
    with pytest.raises(
        ValueError, match=r"Generators .*: draws numbers of random\.Random: set stream_from_host"
    ) as caught:
        compare(drawing(Generators, lambda layer, x: layer.of_python.random()), SLICES)
    assert "\n" not in str(caught.value)


USES: list[Callable[[np.random.RandomState], Any]] = [
    lambda generator: None,
    lambda generator: generator.normal(),
    lambda generator: generator.random_sample(),
    lambda generator: generator.shuffle([1, 2, 3]),
    lambda generator: generator.seed(3),
]


def test_notes_of_numpys_legacy_generator_are_its_present_state() -> None:
    """Its state in memory, which is compared, has no second normal number that was drawn with the first one."""
    generator, drawn = np.random.RandomState(1), random.Random(1)
    notes = OtherGenerators([generator])
    for _ in range(300):
        drawn.choice(USES)(generator)
        notes.note()
        first = generator.normal(), generator.random_sample()
        notes.restore()
        if drawn.random() < 0.5:
            assert (generator.normal(), generator.random_sample()) == first
            notes.restore()


def test_notes_of_a_generator_of_another_kind() -> None:
    """NumPy's legacy functions can be given any generator, which has a smaller state in memory."""
    legacy = np.random.mtrand._rand
    twister = legacy._bit_generator
    notes = OtherGenerators([legacy])
    notes.note()
    try:
        for _ in range(3):
            np.random.set_bit_generator(np.random.PCG64(5))
            notes.note()
            first = np.random.random()
            notes.restore()
            assert np.random.random() == first
            np.random.set_bit_generator(twister)
            notes.note()
            first = np.random.random()
            notes.restore()
            assert np.random.random() == first
    finally:
        np.random.set_bit_generator(twister)
