"""Marks slow cases: `make test` leaves them out, `make test-slow` runs them, and CI runs a part of them.

A case is slow if it combines settings that other cases cover one by one, draws more at random than others, runs a whole
benchmark or a long training, or takes more than a second beside quicker cases of the same subject.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import pytest

COLLECTED = pytest.StashKey[list[pytest.Item]]()
"""All cases of a run, before some of them are selected by markers."""


def slow_if(combines: Callable[..., bool]) -> pytest.MarkDecorator:
    """Mark the cases of a test for whose parameters a function returns true.

    Args:
        combines: The function. Its arguments have the names of parameters of the test or of its fixtures, or are
            `case_id`, what pytest writes in brackets after the name of the test.
    """
    return pytest.mark.slow_if.with_args(combines)


def mark_slow(items: Iterable[pytest.Item]) -> None:
    """Give the cases that `slow_if` chooses the marker `slow`, by which commands select."""
    for item in items:
        for mark in item.iter_markers("slow_if"):
            combines = mark.args[0]
            parameters = {"case_id": item.callspec.id, **item.callspec.params}  # type: ignore[attr-defined]
            if combines(*(parameters[name] for name in inspect.signature(combines).parameters)):
                item.add_marker(pytest.mark.slow)


def without_quick_case(items: Iterable[pytest.Item]) -> set[str]:
    """Return the tests of which all cases are slow though they are marked one by one, and the files that are so."""
    quick: dict[str, bool] = {}
    for item in items:
        groups = [item.nodeid.partition("::")[0]]
        if item.get_closest_marker("slow_if"):
            groups.append(item.nodeid.partition("[")[0])
        for group in groups:
            quick[group] = quick.get(group, False) or item.get_closest_marker("slow") is None
    return {group for group, has_quick in quick.items() if not has_quick}
