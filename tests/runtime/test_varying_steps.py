"""Planned memory of steps that differ: packed documents, lengths that vary, and both."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.families import FAMILIES, VOCABULARY
from support.markers.slow import slow_if
from support.samples.callbacks import Watch
from support.trainer_harness import LanguageModel, Result, batches, fit, shorten_measurements
from torch import Tensor

from lightning_memo import MemoStrategy
from lightning_memo.allocator import AllocatorStats
from lightning_memo.runtime import memory_planner as planning

pytestmark = pytest.mark.usefixtures("own_folder")
LONGEST = 256
STEPS = 36
Lengths = Callable[[random.Random], int]


@pytest.fixture(autouse=True)
def short_and_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shorten_measurements(monkeypatch)
    monkeypatch.setattr(planning, "cache_folder", lambda: tmp_path / "plans")
    monkeypatch.setattr(planning, "_PLANNING_SECONDS", 0.5)


def one_length(rng: random.Random) -> int:
    return LONGEST


def eight_lengths(rng: random.Random) -> int:
    return LONGEST // 2 + LONGEST // 16 * rng.randint(1, 8)


def any_length(rng: random.Random) -> int:
    return rng.randint(LONGEST // 2, LONGEST)


def document_positions(rng: random.Random, tokens: int) -> Tensor:
    """[1, tokens] Positions that begin again at each of several documents, of which most are short."""
    parts: list[Tensor] = []
    while (left := tokens - sum(map(len, parts))) > 0:
        parts.append(torch.arange(min(left, rng.choice([rng.randint(8, 40), rng.randint(30, LONGEST // 2)]))))
    return torch.cat(parts)[None]


def rows(length: Lengths, packed: bool) -> Iterator[dict[str, Tensor]]:
    """Batches of one row, of which the first has the longest row."""
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    for step in range(STEPS + 1):
        tokens = LONGEST if step == 0 else length(rng)
        ids = torch.randint(0, VOCABULARY, (1, tokens), generator=generator)
        positions = {"position_ids": document_positions(rng, tokens)} if packed else {}
        yield {"input_ids": ids, "labels": ids.clone()} | positions


def module() -> LanguageModel:
    return LanguageModel(lambda: FAMILIES["llama"].build(hidden_size=64, max_position_embeddings=LONGEST))


def train(
    data: Any, plan_memory: bool = True, steps: int = STEPS, **settings: Any
) -> tuple[Result, list[AllocatorStats]]:
    watch = Watch()
    strategy = MemoStrategy(**{"alpha": 0.5, "plan_memory": plan_memory} | settings)
    result = fit(strategy, module(), batches(data), max_steps=steps, callbacks=[watch] if plan_memory else [])
    return result, watch.stats


def assert_same(planned: Result, unplanned: Result) -> None:
    assert planned.losses == unplanned.losses
    for ours, theirs in zip(planned.module.parameters(), unplanned.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def of_all_plans(stats: list[AllocatorStats]) -> tuple[int, int]:
    """Requests that the arena served, and all requests. The counters begin anew with each plan."""
    last = [one for one, other in pairwise(stats) if other.served < one.served] + stats[-1:]
    return sum(each.served for each in last), sum(each.served + each.misses for each in last)


HALVES, SLICES, PLAIN = {"alpha": 0.5}, {"alpha": 0.5, "slice_tokens": 64}, {"alpha": "auto"}
CASES = {
    "documents": (one_length, True, HALVES),
    "documents in slices": (one_length, True, SLICES),
    "documents in plain mode": (one_length, True, PLAIN),
    "eight lengths": (eight_lengths, False, HALVES),
    "eight lengths in slices": (eight_lengths, False, SLICES),
    "any length": (any_length, False, HALVES),
    "any length in plain mode": (any_length, False, PLAIN),
    "documents and eight lengths": (eight_lengths, True, HALVES),
    "documents and any length": (any_length, True, HALVES),
    "documents and any length in slices": (any_length, True, SLICES),
}


@slow_if(lambda case: case != "any length in plain mode")
@pytest.mark.parametrize("case", CASES)
def test_nearly_all_requests_are_served_in_the_arena(case: str) -> None:
    length, packed, settings = CASES[case]
    planned, stats = train(rows(length, packed), **settings)
    assert_same(planned, train(rows(length, packed), plan_memory=False, **settings)[0])
    served, requests = of_all_plans(stats)
    assert len(stats) > STEPS // 3 and requests > 5_000
    assert served >= 0.99 * requests, f"{served / requests:.2%}"
    last = stats[-1]
    assert last.bad_frees == 0
    assert last.arena_bytes <= 1.15 * last.peak_live_bytes


def growing(step: int) -> int:
    """Steps of half the length are recorded and planned; then come whole ones, which the first batch announced."""
    return LONGEST // 2 if 0 < step < 12 else LONGEST


def growing_rows() -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for step in range(60):
        ids = torch.randint(0, VOCABULARY, (1, growing(step)), generator=generator)
        yield {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.slow  # a long training
def test_lengths_above_all_recorded_ones_are_planned_once_they_come() -> None:
    planned, stats = train(growing_rows(), steps=50)
    assert_same(planned, train(growing_rows(), plan_memory=False, steps=50)[0])
    before = next(index for index, each in enumerate(stats) if each.misses)  # the first longer step
    assert 0 < stats[before].hits < stats[before].served
    last = stats[-1]
    assert (last.misses, last.fitted, last.bad_frees) == (0, 0, 0)
    assert last.hits > 0 and last.arena_bytes > 1.3 * stats[before].arena_bytes
