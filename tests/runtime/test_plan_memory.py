"""Planned memory serves every request at its offset, changes no result, and leaves nothing behind."""

import json
import shutil
import threading
import warnings
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from support import commands
from support.markers.slow import slow_if
from support.samples.callbacks import Watch
from support.trainer_harness import LanguageModel, Result, Sequences, batches, fit, loader, shorten_measurements
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy, Plan
from lightning_memo.allocator import AllocatorStats, PlannedAllocator
from lightning_memo.runtime import memory_planner as planning
from lightning_memo.utils import native_build as native
from lightning_memo.utils.files import user_cache

CPU = torch.device("cpu")
STEPS = 12  # of which the first are recorded, and the last are served


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch, tmp_path):
    shorten_measurements(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(planning, "cache_folder", lambda: tmp_path / "plans")
    return tmp_path / "plans"


def run(plan_memory=True, family="llama", data=None, steps=STEPS, strategy=None, **settings):
    """A fit, and the allocator's counters after each batch that was served."""
    watch = Watch()
    callbacks = [*settings.pop("callbacks", ()), *([watch] if plan_memory else [])]
    memo = MemoStrategy(**{"alpha": 0.5, "plan_memory": plan_memory} | (strategy or {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*num_workers.*|.*does not have many workers.*")
        result = fit(
            memo, LanguageModel(family), loader(256) if data is None else data, max_steps=steps, callbacks=callbacks,
            **settings,
        )  # fmt: skip
    return result, watch.stats


class Recorded(NamedTuple):
    """A run whose memory was planned, its counters, and the folder in which its plan was cached."""

    result: Result
    stats: list[AllocatorStats]
    cache: Path

    def saved(self, folder):
        """Save the plan in a folder without its trace; returns the settings of a run that uses it."""
        self.result.plan.save(folder / "plan.json")
        return {"alpha": "auto", "plan": folder / "plan.json"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recorded")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(planning, "cache_folder", lambda: folder / "plans")
        return Recorded(*run(), folder / "plans")


@pytest.fixture
def recorded_here(recorded, fresh_cache):
    """The same, as if it had run in this folder."""
    shutil.copytree(recorded.cache, fresh_cache)
    return recorded


@pytest.fixture(scope="module")
def unplanned():
    """What the same run gives without planned memory."""
    return run(plan_memory=False)[0]


@pytest.fixture(scope="module")
def unplanned_by_plan(recorded, tmp_path_factory):
    """What a run by the plan of `recorded` gives without planned memory."""
    return run(plan_memory=False, strategy=recorded.saved(tmp_path_factory.mktemp("unplanned")))[0]


def assert_same(planned, unplanned):
    assert planned.losses == unplanned.losses
    for ours, theirs in zip(planned.module.parameters(), unplanned.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def assert_all_hit(stats):
    last = stats[-1]
    assert last.hits > 0
    assert (last.misses, last.out_of_order, last.bad_frees) == (0, 0, 0)
    assert last.arena_bytes <= 1.02 * last.peak_live_bytes


@pytest.mark.slow
def test_slices_on_the_host_are_planned_too():
    settings = {"stream_from_host": "hidden", "slice_tokens": 16}
    unplanned, _ = run(False, strategy=settings, steps=9)
    planned, stats = run(strategy=settings, steps=9)
    assert_same(planned, unplanned)
    assert_all_hit(stats)


@slow_if(lambda precision: precision != "bf16-true")
@pytest.mark.parametrize(
    ("alpha", "precision", "steps"),
    [(0.0, "32-true", 20), (0.5, "32-true", 40), (1.0, "32-true", 20), (0.5, "bf16-true", 20), (0.5, "bf16-mixed", 20)],
)
def test_many_planned_steps_equal_unplanned_ones(alpha, precision, steps):
    """Forty are enough that they are no longer examined one by one."""
    settings = {"steps": steps, "precision": precision, "strategy": {"alpha": alpha}}
    planned, stats = run(**settings)
    unplanned, _ = run(plan_memory=False, **settings)
    assert_same(planned, unplanned)
    assert len(stats) > steps - 10
    assert_all_hit(stats)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_gqa", "gemma", "gpt2_dropout", "block_dropout", "encoder_layer"])
def test_all_requests_of_a_family_are_served(family):
    strategy = {"alpha": "auto"} if family == "encoder_layer" else {}
    planned, stats = run(family=family, strategy=strategy)
    assert_same(planned, run(plan_memory=False, family=family, strategy=strategy)[0])
    assert_all_hit(stats)


def test_plain_mode_is_planned_too():
    planned, stats = run(strategy={"alpha": "auto"})
    assert planned.plan.swap.plain
    assert_all_hit(stats)


@pytest.mark.slow
def test_the_plan_says_what_was_placed(recorded, tmp_path):
    result, stats, _ = recorded
    placement = result.plan.placement
    assert placement.peak_bytes == stats[-1].arena_bytes
    assert placement.lower_bound_bytes <= placement.peak_bytes
    assert placement.requests * len(stats) == stats[-1].hits + placement.requests  # the first entry is of no step
    result.plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == result.plan


@pytest.mark.slow
def test_accumulation_and_clipping():
    settings = {"steps": 8, "accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    planned, stats = run(**settings)
    assert_same(planned, run(plan_memory=False, **settings)[0])
    assert_all_hit(stats)
    names = [phase.name for phase in planned.plan.placement.phases]
    assert {"backward", "backward 2", "layer 3 forward 2"} <= set(names)


@pytest.mark.slow
def test_validation_in_between_is_left_to_pytorch():
    settings = {"val_data": loader(8), "val_check_interval": 3, "num_sanity_val_steps": 1}
    planned, stats = run(**settings)
    assert_same(planned, run(plan_memory=False, **settings)[0])
    assert_all_hit(stats)


@pytest.mark.slow
def test_workers_that_load_data(unplanned):
    data = DataLoader(Sequences(256), batch_size=2, num_workers=2)
    planned, stats = run(data=data)
    assert_same(planned, unplanned)
    assert_all_hit(stats)


@pytest.mark.slow
def test_other_lengths_are_missed_and_counted():
    def mixed():
        lengths = [32] * 10 + [24, 32, 16, 32, 32, 24]
        return batches({name: t[:, :length] for name, t in batch.items()} for length, batch in
                       zip(lengths, loader(256), strict=False))  # fmt: skip

    planned, stats = run(data=mixed(), steps=16)
    assert_same(planned, run(plan_memory=False, data=mixed(), steps=16)[0])
    assert stats[-1].misses > 0
    assert stats[-1].hits > 0


@pytest.mark.slow
def test_lengths_that_always_change_are_planned_for_too():
    def growing():
        return batches({name: t[:, : 32 - step % 7] for name, t in batch.items()} for step, batch in
                       enumerate(loader(256)))  # fmt: skip

    planned, stats = run(data=growing(), steps=24)
    assert_same(planned, run(plan_memory=False, data=growing(), steps=24)[0])
    assert stats


class Failing(LanguageModel):
    """Fails in a step in the middle."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 10:
            raise RuntimeError("on purpose")
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_a_failed_step_leaves_pytorchs_allocator(unplanned):
    watch = Watch()
    with pytest.raises(RuntimeError, match="on purpose"):
        fit(MemoStrategy(alpha=0.5, plan_memory=True), Failing("llama"), loader(), max_steps=20, callbacks=[watch])
    assert_all_hit(watch.stats)
    allocator = PlannedAllocator(CPU)
    assert not allocator.installed
    assert allocator.stats().arena_bytes == 0
    assert_same(run()[0], unplanned)


class Skipping(LanguageModel):
    """Skips a step in the middle after a part of its forward."""

    def training_step(self, batch, batch_idx):
        if batch_idx in (8, 11):
            try:
                handle = self.model.layers[2].register_forward_hook(_fail) if hasattr(self.model, "layers") else None
                super().training_step(batch, batch_idx)
            except RuntimeError:
                return None
            finally:
                if handle is not None:
                    handle.remove()
        return super().training_step(batch, batch_idx)


def _fail(*args):
    raise RuntimeError("on purpose")


@pytest.mark.slow
def test_a_step_that_is_given_up_costs_nothing_but_misses():
    results = []
    for plan_memory in (True, False):
        watch = Watch()
        memo = MemoStrategy(alpha=0.5, plan_memory=plan_memory)
        callbacks = [watch] if plan_memory else []
        results.append((fit(memo, Skipping("block"), loader(), max_steps=16, callbacks=callbacks), watch.stats))
    (planned, stats), (unplanned, _) = results
    assert_same(planned, unplanned)
    assert stats[-1].hits > stats[-1].misses


@pytest.mark.slow
def test_nothing_is_left_after_training():
    result, _ = run()
    assert all(parameter.grad is not None for parameter in result.module.parameters())
    threads = [thread.name for thread in threading.enumerate()]
    assert not {"build allocator", "plan memory"} & set(threads)
    allocator = PlannedAllocator(CPU)
    assert not allocator.installed
    assert (allocator.stats().live_blocks, allocator.stats().arena_bytes) == (0, 0)


@pytest.mark.slow
def test_no_planning_if_not_wished(unplanned):
    assert unplanned.trainer.strategy.memory is None
    assert unplanned.plan.placement is None


# ---- plans of earlier runs


@pytest.mark.slow
def test_the_same_run_uses_the_cached_plan(recorded_here, fresh_cache):
    first, stats, _ = recorded_here
    second, again = run()
    assert_same(first, second)
    assert len(list(fresh_cache.glob("*.json"))) == 1
    assert len(again) > len(stats)
    assert_all_hit(again)


@pytest.mark.slow
@pytest.mark.parametrize("spoil", ["garbage", "foreign"])
def test_a_cached_plan_that_is_none_is_ignored_with_one_line(recorded_here, fresh_cache, spoil):
    path = next(fresh_cache.glob("*.json"))
    if spoil == "garbage":
        path.write_text("{")
    else:
        document = json.loads(path.read_text())
        document["fingerprint"]["model"] = "another"
        path.write_text(json.dumps(document))
    with pytest.warns(UserWarning, match="ignoring the cached memory plan and planning memory again") as caught:
        second, stats = run()
    assert sum("cached memory plan" in str(warning.message) for warning in caught) == 1
    assert all("\n" not in str(w.message) for w in caught if "cached memory plan" in str(w.message))
    assert_same(recorded_here.result, second)
    assert_all_hit(stats)
    assert Plan.load(path) == second.plan


@pytest.mark.slow
def test_a_given_plan_is_served_after_the_first_step(recorded, unplanned_by_plan, tmp_path):
    second, stats = run(strategy=recorded.saved(tmp_path))
    assert_same(second, unplanned_by_plan)
    assert len(stats) == STEPS
    assert_all_hit(stats)


@pytest.mark.slow
def test_a_placement_of_other_requests_is_replaced(recorded, unplanned_by_plan, tmp_path):
    strategy = recorded.saved(tmp_path)
    document = json.loads((tmp_path / "plan.json").read_text())
    for phase in document["placement"]["phases"]:
        phase["sizes"] = [size + 64 for size in phase["sizes"]]
        phase["offsets"] = [0] * len(phase["offsets"])
    document["placement"]["peak_bytes"] *= 2
    (tmp_path / "plan.json").write_text(json.dumps(document))
    second, stats = run(strategy=strategy)
    assert_same(second, unplanned_by_plan)
    assert second.plan.placement.phases == recorded.result.plan.placement.phases
    assert stats[-1].misses == 0


WRONG = {
    "an offset between alignments": lambda placement: placement["phases"][1]["offsets"].__setitem__(0, 1),
    "an arena that does not exist": lambda placement: placement.update(peak_bytes=2**61),
    "requests below the least": lambda placement: placement.update(min_bytes=2**40),
    "no phases": lambda placement: placement.update(phases=[], peak_bytes=0, lower_bound_bytes=0),
    "all at one place": lambda placement: [
        phase.update(offsets=[0] * len(phase["offsets"])) for phase in placement["phases"]
    ],
    "another number of threads": lambda placement: placement.update(threads=7),
}


@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_plan_never_ends_training(recorded, unplanned_by_plan, tmp_path, wrong):
    strategy = recorded.saved(tmp_path)
    document = json.loads((tmp_path / "plan.json").read_text())
    WRONG[wrong](document["placement"])
    (tmp_path / "plan.json").write_text(json.dumps(document))
    second, stats = run(strategy=strategy)
    assert_same(second, unplanned_by_plan)
    assert second.plan.placement.phases == recorded.result.plan.placement.phases
    assert (stats[-1].misses, stats[-1].bad_frees) == (0, 0)


@pytest.mark.slow
def test_a_cached_trace_of_another_run_is_ignored(recorded_here, fresh_cache):
    path = next(fresh_cache.glob("*.csv"))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    with pytest.warns(UserWarning, match="ignoring the cached memory plan"):
        second, _ = run()
    assert_same(recorded_here.result, second)


@pytest.mark.slow
def test_a_given_plan_has_its_trace_if_it_was_made_here(recorded_here, tmp_path):
    second, _ = run(strategy=recorded_here.saved(tmp_path))
    trace = recorded_here.result.trainer.strategy.memory.trace
    assert second.trainer.strategy.memory.trace.same_requests(trace)
    files = second.trainer.strategy.memory.draw(str(tmp_path / "pictures"))
    assert len(files) == 3 and all(file.stat().st_size for file in files)


@pytest.mark.slow
def test_counters_stay_those_of_the_run(recorded):
    first, stats, _ = recorded
    memory = first.trainer.strategy.memory
    run()
    assert memory.stats.hits == stats[-1].hits == memory.use.hits


# ---- where planning is not possible


def test_a_user_without_a_home_still_trains(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    assert str(user_cache("plans")).startswith(str(tmp_path))


@pytest.mark.slow
def test_without_a_compiler_training_goes_on_and_says_so(unplanned, monkeypatch):
    def no_compiler(*args, **kwargs):
        raise native.BuildError("no C++ compiler: install g++")

    monkeypatch.setattr(planning, "load_library", no_compiler)
    with pytest.warns(UserWarning, match=r"memory is not planned.*install g\+\+.*plan_memory=False"):
        result, stats = run()
    assert_same(result, unplanned)
    assert not stats


@pytest.mark.slow
def test_a_planner_that_fails_is_no_reason_to_stop(unplanned, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr(planning, "plan_memory", fail)
    with pytest.warns(UserWarning, match="memory is not planned: a bug"):
        result, stats = run()
    assert_same(result, unplanned)
    assert not stats


@pytest.mark.slow
def test_counters_go_to_the_logger(tmp_path):
    from lightning.pytorch.loggers import CSVLogger

    run(logger=CSVLogger(tmp_path), log_every_n_steps=2)
    header, *rows = (next(tmp_path.rglob("metrics.csv"))).read_text().splitlines()
    names = header.split(",")
    assert {"memory/hits", "memory/miss_size", "memory/arena_bytes", "memory/peak_live_bytes"} <= set(names)
    last = dict(zip(names, rows[-1].split(","), strict=True))
    assert float(last["memory/hits"]) > 0


@pytest.mark.slow
def test_a_process_that_ends_waits_for_the_solver(tmp_path):
    """A process that did not wait would be aborted when the solver returns (status 134)."""
    code = """
import time, numpy
from lightning_memo.planner.linear_program import SilentSolver
from lightning_memo.runtime.memory_planner import in_background

def solve():
    rng, highs = numpy.random.default_rng(0), SilentSolver()
    highs.setOptionValue("time_limit", 1.0)
    chosen = [highs.addBinary() for _ in range(100)]
    for weights in rng.integers(1, 1000, (50, 100)).tolist():
        highs.addConstr(sum(w * x for w, x in zip(weights, chosen)) <= sum(weights) // 2)
    solving.append(True)
    highs.maximize(sum(w * x for w, x in zip(rng.integers(1, 1000, 100).tolist(), chosen)))

solving = []
future = in_background(solve, "plan memory", finish_at_exit=True)
while not solving:
    time.sleep(0.01)
time.sleep(0.1)
print(future.done())
"""
    assert commands.run(["python", "-c", code], tmp_path)[:2] == (0, "False\n")
