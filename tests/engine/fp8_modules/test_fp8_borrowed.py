"""Layers that call modules of TransformerEngine that they do not have as their own, in one line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.architectures.fp8_models import FromThirdStep, InFp8, blocks_of, line_of, recipe_of, strategy, trained
from torch import Tensor, nn

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


def _borrowing(held: str, owns: bool, kind: str = "Linear") -> nn.Module:
    te = sys.modules["transformer_engine.pytorch"]
    shared = te.Linear(32, 32) if kind == "Linear" else getattr(te.ops, kind)(32)
    calls = {"itself": shared, "closure": lambda x: shared(x), "list": lambda x, held=[shared]: held[0](x)}[held]
    model = blocks_of(lambda: _Borrowing(calls, te.Linear(32, 32) if owns else None))
    model.shared = shared
    return model


@pytest.mark.parametrize(("held", "owns"), [("itself", False), ("closure", False), ("list", True)])
@pytest.mark.parametrize("kind", [InFp8, FromThirdStep])
def test_modules_of_others_are_refused(te: Any, kind: Any, held: str, owns: bool) -> None:
    line = line_of(kind(recipe_of("delayed"), lambda: _borrowing(held, owns)), alpha=1.0, max_steps=4)
    assert line.startswith("_Borrowing calls Linear, which is TransformerEngine's and computes in FP8, but is none of")


@pytest.mark.parametrize("owns", [True, False])
@pytest.mark.parametrize("held", ["itself", "closure", "list"])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
def test_operations_of_others_are_refused(te: Any, kind: str, held: str, owns: bool) -> None:
    """The first module of an autocast may be one, and would not be it any more after a look at the layer."""
    module = InFp8(recipe_of("delayed"), lambda: _borrowing(held, owns, kind))
    line = line_of(module, alpha=1.0)
    assert line.startswith(
        f"_Borrowing calls {kind}, which is TransformerEngine's and runs in its FP8 autocast, but is"
    )


def test_operations_of_others_run_without_fp8(te: Any) -> None:
    _, expected = trained(None, InFp8(None, lambda: _borrowing("list", False, "RMSNorm")), max_steps=3)
    _, found = trained(strategy(), InFp8(None, lambda: _borrowing("list", False, "RMSNorm")), max_steps=3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
