"""Estimates with the package's constants agree with rehearsals on a simulated GPU (benchmarks/results/rehearsed)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.benchmark_modules import benchmark_modules, load

BOUNDS = (5.0, 2.0, 2.0)
"""Bounds of the errors of step, device memory and host memory in percent."""

EXCHANGED = (5.0, 3.0, 6.0)
"""Bounds where the device and the host are nearly equal places, and small differences of times decide between them."""

PLANNED_AGAIN = (5.0, 8.0, 3.0)
"""Bounds where the first plan did not fit because memory was fragmented, and the next one leaves more of the device."""

EXCEPTIONS = {
    ("128GiB", "llama3_8b", "full", 262144, "memo_auto_unplanned"): EXCHANGED,
    ("1TiB", "llama3_8b", "full", 262144, "memo_auto_unplanned"): EXCHANGED,
    ("1TiB", "llama3_8b", "full", 131072, "memo_auto_unplanned"): PLANNED_AGAIN,
}


@pytest.fixture(scope="module")
def agreement() -> Iterator[Any]:
    with benchmark_modules():
        yield load("agreement")


@pytest.fixture(scope="module")
def found(agreement: Any) -> list[Any]:
    return agreement.comparisons()


@pytest.mark.slow
def test_the_default_and_checkpointing_agree(found: list[Any]) -> None:
    shown = [c for c in found if c.cell.method in ("memo_auto_unplanned", "checkpointing")]
    fitting = [c for c in shown if c.fits]
    assert len(fitting) >= 20
    assert {(c.cell.model, c.cell.tuning) for c in fitting} == {
        ("llama3_8b", "lora"), ("llama3_8b", "full"), ("llama3_2_1b", "full"),
    }  # fmt: skip
    _check(fitting)


@pytest.mark.slow
def test_given_alphas_agree(found: list[Any]) -> None:
    given = [c for c in found if c.cell.method.startswith("memo_alpha") and c.fits]
    assert len(given) >= 20
    _check(given)


def test_rehearsals_that_the_estimate_was_not_compared_with_before_agree(agreement: Any) -> None:
    further = agreement.comparisons("rehearsed_further")
    assert len(further) >= 22 and {c.cell.model for c in further} >= {"llama3_8b", "qwen3_8b"}
    _check([c for c in further if c.fits])
    assert all((c.estimated.status == "ok") == c.fits for c in further)


def test_one_rank_of_eight_agrees(agreement: Any) -> None:
    """The one that does not fit fails by the allocator's fragments, and fits with expandable segments."""
    ranks = agreement.of_ranks()
    fitting = [c for c in ranks if c.fits]
    assert {(c.cell.ranks, c.cell.tokens) for c in fitting} == {(8, 2**20), (8, 5 * 2**20)} and len(fitting) >= 4
    for c in fitting:  # in layers that run again in the backward, the estimate's attention is faster
        time, device, host = map(abs, c.errors)
        assert time < (3 if c.cell.tokens == 2**20 else 8) and device < 7 and host < 4
    (other,) = (c.cell.method for c in ranks if not c.fits)
    assert (other, "expandable_segments") in [(c.cell.method, c.cell.allocator) for c in fitting]


def _check(comparisons: list[Any]) -> None:
    found = {(c.host, c.cell.model, c.cell.tuning, c.cell.tokens, c.cell.method): c.errors for c in comparisons}
    wrong = {
        cell: errors
        for cell, errors in found.items()
        if any(abs(error) > bound for error, bound in zip(errors, EXCEPTIONS.get(cell, BOUNDS), strict=True))
    }
    assert not wrong


def test_what_fits_is_told(found: list[Any]) -> None:
    wrong = [c for c in found if (c.estimated.status == "ok") != c.fits]
    assert not wrong


@pytest.mark.slow
def test_the_table_of_the_page_is_up_to_date(
    agreement: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agreement.py", "--check"])
    assert agreement.main() == 0, capsys.readouterr().err
