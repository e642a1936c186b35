"""The plan cache stays within its limit, also if other processes read and write its folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support.samples.plans import small_plan, small_step

from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.plan_cache import PlanCache
from lightning_memo.artifacts.trace import Trace


@pytest.fixture
def made() -> tuple[Plan, Trace]:
    """The plan and the trace that a run saves."""
    trace, placement = small_step()
    return replace(small_plan(), placement=placement), trace


def named(plan: Plan, name: str) -> Plan:
    return replace(plan, fingerprint=replace(plan.fingerprint, model=name))


def refuse(text: str) -> None:
    raise AssertionError(text)


def room_for(count: float, made: tuple[Plan, Trace], folder: Path) -> PlanCache:
    plan, trace = made
    trace.save(folder / "size" / "a.csv")
    plan.save(folder / "size" / "a.json")
    size = sum(path.stat().st_size for path in (folder / "size").iterdir())
    assert plan.placement is not None
    return PlanCache(folder / "plans", refuse, plan.placement.threads, "", int(count * size))


def age(paths: Iterable[Path], seconds: float) -> None:
    """Set the modification times, because file system clocks are too coarse for plans that are saved in succession."""
    for path in paths:
        now = path.stat().st_mtime
        os.utime(path, (now - seconds, now - seconds))


def test_what_was_not_used_for_longest_goes(made: tuple[Plan, Trace], tmp_path: Path) -> None:
    plan, trace = made
    cache = room_for(2.5, made, tmp_path)
    first, second, third = (named(plan, name) for name in ("m1", "m2", "m3"))
    for each, seconds in ((first, 200), (second, 100)):
        cache.store(each, trace)
        age(cache.folder.glob(f"{cache._path(each).stem}.*"), seconds)
    assert cache.find(first) is not None, "the last use counts"
    cache.store(third, trace)
    assert cache.find(second) is None
    for each in (first, third):
        found = cache.find(each)
        assert found is not None and found[0] == plan.placement
    assert len(list(cache.folder.iterdir())) == 4


def test_what_killed_processes_left_goes(made: tuple[Plan, Trace], tmp_path: Path) -> None:
    cache = room_for(1.5, made, tmp_path)
    cache.folder.mkdir()
    (cache.folder / ".1234.m0.csv").write_text("x" * cache.limit_bytes)
    age(cache.folder.iterdir(), 7200)
    cache.store(*made)
    assert {path.suffix for path in cache.folder.iterdir()} == {".json", ".csv"}
    assert cache.find(made[0]) is not None


def test_a_plan_that_is_larger_than_all_may_be_is_kept_until_the_next_one(
    made: tuple[Plan, Trace], tmp_path: Path
) -> None:
    cache = room_for(0.5, made, tmp_path)
    cache.store(*made)
    assert cache.find(made[0]) is not None


def test_several_at_once_see_whole_plans_or_none(made: tuple[Plan, Trace], tmp_path: Path) -> None:
    plan, trace = made
    cache = room_for(3.5, made, tmp_path)

    def work(worker: int) -> None:
        for turn in range(6):
            mine, others = (named(plan, f"m{(number + turn) % 6}") for number in (worker, worker + 1))
            cache.store(mine, trace)
            found = cache.find(others)
            assert found is None or found[0] == plan.placement

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    cache.store(plan, trace)
    assert sum(path.stat().st_size for path in cache.folder.iterdir()) <= cache.limit_bytes
