"""Layers that call modules of TransformerEngine that they do not have as their own, in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from support.architectures.fp8_models import InFp8, blocks_of, line_of, recipe_of
from support.trainer_harness import LanguageModel
from torch import Tensor, nn
from typing_extensions import override

pytestmark = [pytest.mark.usefixtures("own_folder")]


class _Borrowing(nn.Module):
    """A block that calls a module which it does not have as its own."""

    def __init__(self, calls: Callable[[Tensor], Tensor], own: nn.Module | None) -> None:
        super().__init__()
        self.inner, self.own = nn.Linear(32, 32), own
        object.__setattr__(self, "calls", calls)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.own is None else x + self.own(x)
        return x + self.calls(nn.functional.gelu(self.inner(x)))


class _Later(InFp8):
    """A module that computes in FP8 from the third step on."""

    @override
    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        return LanguageModel.loss(self, batch) if self.global_step < 2 else super().loss(batch)


def _borrowing(held: str, owns: bool) -> nn.Module:
    te = sys.modules["transformer_engine.pytorch"]
    shared = te.Linear(32, 32)
    calls = {"itself": shared, "closure": lambda x: shared(x), "list": lambda x, held=[shared]: held[0](x)}[held]
    model = blocks_of(lambda: _Borrowing(calls, te.Linear(32, 32) if owns else None))
    model.shared = shared
    return model


@pytest.mark.parametrize(
    ("held", "owns", "allowed"),
    [("itself", False, False), ("itself", False, True), ("closure", False, False), ("list", True, True)],
)
@pytest.mark.parametrize("kind", [InFp8, _Later])
def test_modules_of_others_are_refused(te: Any, kind: Any, held: str, owns: bool, allowed: bool) -> None:
    module = kind(recipe_of("delayed"), lambda: _borrowing(held, owns))
    if not owns and allowed:  # checked before the first step
        assert "these have none" in line_of(module, alpha=1.0)
        return
    line = line_of(module, transformer_engine_fp8=allowed, alpha=1.0, max_steps=4)
    assert line.startswith("_Borrowing calls Linear, which is TransformerEngine's and computes in FP8, but is none of")
