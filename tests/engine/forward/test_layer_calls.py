"""Ways in which models call their layers: the hidden states by keyword, or twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.families import VOCABULARY, PlainBlock, PlainModel
from support.markers.slow import slow_if
from support.trainer_harness import LanguageModel, fit, plain
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from lightning_memo import MemoStrategy

pytestmark = pytest.mark.usefixtures("own_folder")

SETTINGS: list[dict[str, Any]] = [
    {}, {"alpha": 0.0}, {"alpha": 0.5}, {"alpha": 1.0}, {"alpha": 0.5, "slice_tokens": 8, "stream_from_host": "hidden"},
]  # fmt: skip


class ByKeyword(PlainBlock):
    def forward(self, *, x: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
        return scale * super().forward(x)


class Compared(PlainBlock):
    """Asks whether its context is its input."""

    def forward(self, x: Tensor, context: Tensor, other: Tensor | None = None) -> Tensor:  # type: ignore[override]
        x = super().forward(x if context is x else 2 * x + context)
        return x if other is None else x + other


class CallingModel(PlainModel):
    def __init__(self, kind: type[PlainBlock], call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__([kind() for _ in range(3)])
        self.call = call

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = self.call(block, x)
        logits = self.head(x)[:, :-1].reshape(-1, VOCABULARY)
        return CausalLMOutput(loss=F.cross_entropy(logits, labels[:, 1:].flatten()))


CALLS: dict[str, tuple[type[PlainBlock], Callable[[Any, Tensor], Tensor]]] = {
    "by keyword only": (ByKeyword, lambda block, x: block(x=x)),
    "by keyword, beside others": (ByKeyword, lambda block, x: block(scale=0.5, x=x)),
    "twice": (Compared, lambda block, x: block(x, x)),
    "twice, by keyword": (Compared, lambda block, x: block(x, context=x, other=x)),
    "all by keyword": (Compared, lambda block, x: block(context=x, x=x)),
    "a copy": (Compared, lambda block, x: block(x, x.clone())),
}


@slow_if(lambda call, settings: settings != {"alpha": 0.5} or call in ("a copy", "twice"))
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_layers_compute_as_in_plain_training(call: str, settings: dict[str, Any]) -> None:
    def module() -> LanguageModel:
        torch.manual_seed(0)
        return LanguageModel(lambda: CallingModel(*CALLS[call]))

    result = fit(MemoStrategy(**settings), module())
    assert result.losses == pytest.approx(plain(module()).losses, rel=1e-6)


def test_keywords_that_come_before_the_hidden_states_are_refused() -> None:
    class Other(PlainBlock):
        def forward(self, *, scale: float, x: Tensor) -> Tensor:  # type: ignore[override]
            return scale * super().forward(x)

    with pytest.raises(ValueError, match="Other got float as its first argument: layers get their hidden states there"):
        fit(MemoStrategy(), LanguageModel(lambda: CallingModel(Other, lambda b, x: b(scale=1.0, x=x))))
