"""What TransformerEngine's modules save for each token, compared with the table in `docs/finetuning.md`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.architectures.fp8_models import manager, recipe_of
from support.devices import DEVICE
from support.paths import ROOT
from torch import Tensor

HIDDEN, FFN = 128, 256  # whole blocks
SIZES = {"Linear": (HIDDEN, HIDDEN), "LayerNormLinear": (HIDDEN, 3 * HIDDEN), "LayerNormMLP": (HIDDEN, FFN)}
DTYPES = (torch.bfloat16, torch.uint8, torch.float32)
RECIPES = ("delayed", "current", "mxfp8", "blocks")


def documented(kind: str, recipe: str) -> dict[torch.dtype, float]:
    """Return the bytes for each token that the table states: `bfloat16`, FP8 and `float32`."""
    lines = (ROOT / "docs/finetuning.md").read_text().splitlines()
    row = next(line for line in lines if line.startswith(f"| `{kind}` |") and line.count("|") == 5)
    found = dict.fromkeys(DTYPES, 0.0)
    for dtype, cell in zip(DTYPES, row.split("|")[2:5], strict=True):
        for number, size, other in re.findall(r": (\d*) ?([HF]?)(?: \((\d) F with blocks\))?", cell):
            times = int(other) if other and recipe in ("mxfp8", "blocks") else int(number or 1)
            found[dtype] += times * {"H": HIDDEN, "F": FFN, "": 1}[size]
    if recipe == "mxfp8":
        found[torch.uint8] *= 33 / 32  # with an exponent for each 32 values
    if recipe == "blocks":
        found[torch.float32] += found[torch.uint8] * 4 / 128  # a scale for each 128 values
    return found


def saved(te: Any, kind: str, recipe: str, rows: int) -> Counter[torch.dtype]:
    """Return the bytes of all that a module saves, by dtype."""
    manager().reset()
    module = getattr(te, kind)(*SIZES.get(kind, (HIDDEN,))).to(DEVICE, torch.bfloat16)
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    found: Counter[torch.dtype] = Counter()

    def pack(t: Tensor) -> Tensor:
        found[t.dtype] += t.nbytes
        return t

    with te.autocast(recipe=recipe_of(recipe)), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    return found


def cases() -> Iterator[tuple[str, str]]:
    for kind in (*SIZES, "LayerNorm", "RMSNorm"):
        yield from ((kind, recipe) for recipe in RECIPES)


@pytest.mark.parametrize(("kind", "recipe"), list(cases()))
def test_modules_save_what_the_table_states(te: Any, kind: str, recipe: str) -> None:
    few, many = (saved(te, kind, recipe, rows) for rows in (128, 256))
    expected = documented(kind, recipe)
    assert {dtype: (many[dtype] - few[dtype]) / 128 for dtype in DTYPES} == expected
    assert set(few) <= set(DTYPES) and any(expected.values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_modules_save_their_weights_by_rows_and_columns(te: Any, recipe: str) -> None:
    few, many = (saved(te, "Linear", recipe, rows) for rows in (128, 256))
    fixed = 2 * few[torch.uint8] - many[torch.uint8]
    assert fixed == 2 * HIDDEN * HIDDEN * (33 / 32 if recipe == "mxfp8" else 1)
