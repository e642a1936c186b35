"""Architectures drawn at random train as plain training does, or are refused in one clear line.

`DRAWS=50 pytest tests/engine/token_locality/test_random_architectures.py` draws fifty times as many.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
from support.architectures.models import Architecture, RandomModule, draw, train
from support.draws import draws
from support.markers.slow import slow_if
from support.random_training import assert_clear
from support.trainer_harness import copy_threads

from lightning_memo import MemoStrategy
from lightning_memo.engine.modules import layer_classes
from lightning_memo.engine.slices import slice_schedules
from lightning_memo.engine.state.layer_state import LayerState
from lightning_memo.engine.token_locality.prove_locality import Locality, LocalityProofs

CHUNKS, DRAWS = 40, draws(300)
BOUND = 1e-5  # of a parameter's gradient
NEGLIGIBLE = 1e-7  # of the largest gradient


def assert_as_plain(actual: RandomModule, expected: RandomModule) -> None:
    """Assert that every gradient of every step is plain training's up to rounding."""
    assert len(actual.gradients) == len(expected.gradients)
    for step, (mine, plain) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
        assert mine.keys() == plain.keys()
        if not all(t.isfinite().all() for t in plain.values()):
            assert not all(t.isfinite().all() for t in mine.values())
            return  # plain training diverges
        largest = max(float(t.norm()) for t in plain.values())
        for name, t in plain.items():
            error, norm = float((mine[name] - t).norm()), float(t.norm())
            assert error <= BOUND * norm + NEGLIGIBLE * largest, f"step {step}, {name}: {error:.1e} of {norm:.1e}"


def outcome(architecture: Architecture) -> str:
    """Train, compare, and return "trained" or the line that refuses the architecture."""
    try:
        actual = train(architecture, MemoStrategy(**architecture.settings))
    except ValueError as error:
        assert_clear(error)
        return str(error)
    assert copy_threads() == []
    assert_as_plain(actual, train(architecture, "auto"))
    return "trained"


@slow_if(lambda chunk: chunk >= 1)
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_trains_as_plain_training_or_refuses(chunk: int) -> None:
    seeds, trained = range(chunk, DRAWS, CHUNKS), 0
    for seed in seeds:
        architecture = draw(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trained += outcome(architecture) == "trained"
            except Exception as error:
                raise AssertionError(f"seed {seed}: {architecture}: {error}") from error
    assert trained >= len(seeds) // 2  # refusing is no way out


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("seed", [342])  # compared on two tokens of two sequences
def test_once_refused_without_need(seed: int) -> None:
    assert outcome(draw(seed)) == "trained"


def _no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalityProofs, "of", lambda *_: Locality(""))
    monkeypatch.setattr(layer_classes, "why_other_at", lambda *_: "")


def _no_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_schedules, "_join", lambda parts, place: parts[-1])


def _no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LayerState, "restore", lambda _: None)
    monkeypatch.setattr(LayerState, "restore_random", lambda _: None)


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(("plant", "seeds"), [(_no_proof, (11, 20, 24)), (_no_join, (14, 28, 67)), (_no_state, (0, 3))])
def test_planted_faults_are_noticed(monkeypatch: pytest.MonkeyPatch, plant: Any, seeds: tuple[int, ...]) -> None:
    plant(monkeypatch)
    for seed in seeds:
        architecture = draw(seed)
        unchecked = replace(architecture, settings=architecture.settings | {"check_slices": False})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(AssertionError, match=r"step \d"):
                outcome(unchecked)
