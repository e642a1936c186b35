"""Dicts that a model gives to each layer, in which layers leave tensors for later ones."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.nn.functional as F
from support.attention.recorded_training import compare
from support.families import VOCABULARY, PlainBlock, PlainModel
from support.trainer_harness import LanguageModel, fit, loader, plain
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

SETTINGS: list[dict[str, Any]] = [
    *({"alpha": alpha} for alpha in (0.0, 0.5, 1.0)),
    {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "hidden"},
]


class Sharing(PlainModel):
    """Gives a dict of one class to all blocks, and uses what is in it at the end."""

    def __init__(self, kind: Callable[[], PlainBlock], made: Callable[[], Any], by_name: bool) -> None:
        super().__init__([kind() for _ in range(4)])
        for number, block in enumerate(self.blocks):
            block.number = number  # type: ignore[assignment]
        self.made, self.by_name = made, by_name

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x, shared = self.embed(input_ids), self.made()
        for block in self.blocks:
            x = block(x, shared=shared) if self.by_name else block(x, shared)
        assert isinstance(shared, type(self.made()))
        x = x + sum(t for t in shared.values() if isinstance(t, Tensor) and t.shape == x.shape)
        loss = F.cross_entropy(self.head(x)[:, :-1].reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1))
        return CausalLMOutput(loss=loss)


class Leaving(PlainBlock):
    """The first block leaves two tensors, the others read them, and the last removes one."""

    number: int

    def forward(self, x: Tensor, shared: Any) -> Any:
        if self.number == 0:
            shared["pair"] = self.out(x), x.transpose(1, 2).sin().transpose(1, 2)
            shared["x"] = shared["pair"][1] * 2
        a, b = shared["pair"]
        y = super().forward(x) + a * b + shared["x"]
        if self.number == 3:
            del shared["pair"]
        return y


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize(("made", "by_name"), [(dict, True), (UserDict, False), (OrderedDict, True)])
@pytest.mark.filterwarnings("error:.*as one slice")
def test_what_slices_leave_is_joined(made: Callable[[], Any], by_name: bool, settings: dict[str, Any]) -> None:
    compare(lambda: Sharing(Leaving, made, by_name), settings)


class Adding(PlainBlock):
    """Adds to what earlier blocks have left: a number, and a statistic over tokens."""

    def forward(self, x: Tensor, shared: Any) -> Tensor:
        shared["calls"] = shared.get("calls", 0) + 1
        shared["mean"] = shared.get("mean", 0.0) + x.mean((1, 2), keepdim=True)
        return super().forward(x) * (1 + shared["calls"] / 10) + shared["mean"]


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_what_counts_runs_is_written_once(alpha: float) -> None:
    compare(lambda: Sharing(Adding, UserDict, by_name=True), {"alpha": alpha})


def test_a_statistic_over_tokens_lets_layers_run_whole() -> None:
    with pytest.warns(UserWarning, match="layers run as one slice.*along the tokens"):
        compare(lambda: Sharing(Adding, dict, by_name=False), {"alpha": 0.5})


def test_plain_steps_and_validation() -> None:
    def build() -> nn.Module:
        return Sharing(Leaving, UserDict, by_name=True)

    settings = {"max_steps": 2, "val_check_interval": 1, "limit_val_batches": 1}
    result = fit(MemoStrategy(), LanguageModel(build), loader(), loader(), **settings)
    expected = plain(LanguageModel(build), loader(), val_data=loader(), **settings)
    assert result.losses == expected.losses and result.plan.swap.plain


@dataclass
class Output:
    hidden: Tensor


class ReturningAnObject(Leaving):
    def forward(self, x: Tensor, shared: Any) -> Output:
        return Output(super().forward(x, shared))


class Unpacking(Sharing):
    def __init__(self) -> None:
        super().__init__(ReturningAnObject, dict, by_name=True)
        for block in self.blocks:
            block.register_forward_hook(lambda block, _, output: output.hidden)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:.*as one slice")
def test_outputs_that_are_dataclasses() -> None:
    compare(Unpacking, {"alpha": 0.5})
