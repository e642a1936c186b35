"""Plans by kinds of tensors, from a profiled step to a trained model: budgets, files, several processes, tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from support.modes import BY_ALPHA, BY_KIND, JOINT
from support.parallel_training import Run, train_alone, train_together
from support.samples.storage_problems import ALWAYS, CALL, COSTS, LABEL, LAYERS, MIB, planned
from support.trainer_harness import LanguageModel, ResumableLoader, Sequences, fit, plain
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.costs import Budget
from lightning_memo.artifacts.plan import Plan
from lightning_memo.planner.make_plan import with_spare_device
from lightning_memo.planner.storage_planner import StorageError
from lightning_memo.runtime import activation_planner
from lightning_memo.runtime import solve_plan as planning
from lightning_memo.runtime.solve_plan import common_problem, plan_by_kind

KIB = 1024
# Less than plain training needs of the device, and less than two layers save of the host.
BUDGET = {"device_memory": "1.18MiB", "host_memory": "100KiB"}


pytestmark = pytest.mark.usefixtures("own_folder")


def strategy(**settings: Any) -> MemoStrategy:
    return MemoStrategy(test_mode=BY_KIND, **BUDGET | settings)


def test_trains_as_plain_within_both_budgets(tmp_path: Path) -> None:
    expected = plain(LanguageModel("llama_gqa")).losses
    result = fit(strategy(), LanguageModel("llama_gqa"), default_root_dir="run")
    assert result.losses == pytest.approx(expected, rel=1e-5)
    swap = result.plan.swap
    assert not swap.storage.has_one_alpha
    assert 0 < swap.host_bytes <= 100 * KIB
    assert result.plan.device_bytes <= result.plan.budget.device_bytes
    assert result.held == [0] * len(result.losses)
    assert Plan.load(tmp_path / "run" / "memo_plan.json") == result.plan


class TwoBackwards(LanguageModel):
    """Each batch has two backwards through the same graph."""

    @override
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


def test_a_profiled_graph_has_several_backwards() -> None:
    expected = plain(TwoBackwards("llama_gqa")).losses
    result = fit(strategy(), TwoBackwards("llama_gqa"))
    assert result.losses == pytest.approx(expected, rel=1e-5)
    assert not result.plan.swap.storage.has_one_alpha


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_plan() -> None:
    def run(steps: int, **settings: Any) -> Any:
        data = ResumableLoader(Sequences(10))
        return fit(strategy(), LanguageModel("llama_gqa"), data, max_steps=steps, max_epochs=9, **settings)

    saver = ModelCheckpoint("saved", every_n_train_steps=3, save_top_k=-1)
    uninterrupted = run(6, callbacks=[saver], enable_checkpointing=True)
    resumed = run(6, ckpt_path=Path("saved") / "epoch=0-step=3.ckpt")
    assert resumed.plan.swap == uninterrupted.plan.swap
    assert resumed.losses == uninterrupted.losses[3:]


@pytest.mark.slow
@pytest.mark.parametrize("host_memory", ["40KiB", "100KiB"], ids=["recomputes attention", "stores attention"])
def test_a_plan_of_another_schedule(host_memory: str, tmp_path: Path) -> None:
    budget = BUDGET | {"host_memory": host_memory}
    first = fit(MemoStrategy(**budget), LanguageModel("llama_gqa"), max_steps=1)
    first.plan.save(tmp_path / "plan.json")
    assert not first.plan.swap.storage.has_one_alpha and not first.plan.swap.joint_attention
    again = MemoStrategy(test_mode=JOINT, **budget, plan=tmp_path / "plan.json")
    if host_memory == "40KiB":
        with pytest.warns(UserWarning, match="attention runs over all tokens at once, and its outputs have no place"):
            result = fit(again, LanguageModel("llama_gqa"))
    else:
        result = fit(again, LanguageModel("llama_gqa"))
    assert result.losses == pytest.approx(plain(LanguageModel("llama_gqa")).losses, rel=1e-5)


def test_a_plan_of_kinds_is_made_anew_for_one_alpha(tmp_path: Path) -> None:
    fit(strategy(), LanguageModel("llama_gqa"), max_steps=1).plan.save(tmp_path / "plan.json")
    one_alpha = MemoStrategy(test_mode=BY_ALPHA, plan=tmp_path / "plan.json")
    with pytest.warns(UserWarning, match="names a place for each kind of tensor"):
        result = fit(one_alpha, LanguageModel("llama_gqa"), max_steps=1)
    assert result.plan.swap.plain or result.plan.swap.storage.has_one_alpha


def _plan_of(trainer: Any) -> dict[str, Any]:
    return {"swap": trainer.strategy.plan.swap}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "device_memory"), [(2, "740KiB"), (3, "640KiB")])
def test_processes_with_the_same_layers_have_the_same_plan(stage: int, device_memory: str) -> None:
    run = Run(family="llama_gqa", steps=3)
    settings = {"test_mode": BY_KIND, "zero_stage": stage, "device_memory": device_memory, "host_memory": "200KiB"}
    together = train_together(2, run, settings, _plan_of)
    first, second = together.notes["swap"]
    assert first == second
    errors = together.worst_error(train_alone(run))
    assert max(errors.values()) <= 1e-4


# ---- the default


@pytest.mark.slow
@pytest.mark.parametrize("joint", [False, True])
def test_kinds_are_planned_by_default(joint: bool) -> None:
    result = fit(MemoStrategy(test_mode=JOINT if joint else None, **BUDGET), LanguageModel("llama_gqa"))
    assert result.plan.swap.joint_attention == joint
    assert not result.plan.swap.storage.has_one_alpha
    assert result.losses == pytest.approx(plain(LanguageModel("llama_gqa")).losses, rel=1e-5)


@pytest.mark.parametrize("settings", [{"alpha": 0.25}, {"slice_tokens": 16}, {"test_mode": BY_ALPHA}], ids=str)
def test_alpha_is_planned_where_kinds_cannot_be(settings: dict[str, Any]) -> None:
    result = fit(MemoStrategy(**BUDGET | {"host_memory": "1MiB"} | settings), LanguageModel("llama_gqa"))
    assert not result.plan.swap.plain and result.plan.swap.storage.has_one_alpha
    assert result.losses == pytest.approx(plain(LanguageModel("llama_gqa")).losses, rel=1e-5)


def test_alpha_is_planned_where_the_program_finds_nothing() -> None:
    budget = {"device_memory": "400KiB", "host_memory": "1MiB"}  # weights and a layer need more
    with pytest.warns(UserWarning, match="more than the budget"):
        result = fit(MemoStrategy(**budget), LanguageModel("llama_gqa"), max_steps=3)
    assert result.plan.swap.alpha == 0.0 and result.plan.swap.storage.has_one_alpha


@pytest.mark.parametrize(
    ("seconds", "settings", "by_kind"),
    [
        (0.0, {"host_memory": "1MiB"}, True),
        (1e9, {"host_memory": "1MiB"}, False),
        (1e9, {"host_memory": "1KiB", "device_memory": "1MiB"}, True),  # no alpha fits the host
        (1e9, {"host_memory": "1MiB", "device_memory": "840KiB"}, True),  # alpha 0 needs 853 KiB
    ],
    ids=["faster", "slower", "little host", "little device"],
)
def test_the_faster_plan_that_fits_is_used(
    seconds: float, settings: dict[str, Any], by_kind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def expected(*args: Any, **kwargs: Any) -> Any:
        plan = plan_by_kind(*args, **kwargs)
        return plan and replace(plan, step_seconds=seconds)

    monkeypatch.setattr(activation_planner, "plan_by_kind", expected)
    result = fit(MemoStrategy(**BUDGET | settings), LanguageModel("llama_gqa"))
    assert (not result.plan.swap.storage.has_one_alpha) == by_kind
    assert result.losses == pytest.approx(plain(LanguageModel("llama_gqa")).losses, rel=1e-5)


# ---- planning


@pytest.mark.parametrize("unit", [1, 64, 2**20])
def test_budgets_are_kept_to_the_byte(unit: int) -> None:
    budget = Budget(device_bytes=ALWAYS + 150 * MIB, host_bytes=60 * MIB)
    plan = planned(budget, unit)
    assert 50 * MIB < plan.swap.host_bytes <= budget.host_bytes
    assert plan.device_bytes <= budget.device_bytes
    assert 0.0 <= plan.swap.alpha <= 1.0


@pytest.mark.parametrize("less", [1, 300_000, MIB])
def test_a_budget_that_only_alignment_exceeds(less: int) -> None:
    device = 300 * MIB
    ample = planned(Budget(device_bytes=device, host_bytes=1000 * MIB), unit=MIB).swap
    budget = Budget(device_bytes=device, host_bytes=ample.host_bytes - less)
    assert planned(budget, unit=MIB).swap.host_bytes <= budget.host_bytes


def test_what_cannot_be_held_is_told() -> None:
    with pytest.raises(StorageError, match=r"lacks .*: raise device_memory, or shorten"):
        planned(Budget(device_bytes=2000, host_bytes=MIB))


def test_the_common_problem_is_that_of_the_slowest_with_the_least_room() -> None:
    slow = replace(
        COSTS, classes=(replace(CALL, forward_seconds=0.2),), fixed_device_bytes=3000,
        disk_write_bytes_per_second=4.0, disk_read_bytes_per_second=3.0,
    )  # fmt: skip
    fast = replace(COSTS, disk_write_bytes_per_second=2.0, disk_read_bytes_per_second=9.0)
    problems = [
        (fast, Budget(device_bytes=ALWAYS + 8500, host_bytes=70, disk_bytes=7)),
        (slow, Budget(device_bytes=ALWAYS + 2000 + 9500, host_bytes=90, disk_bytes=5)),
    ]
    found = common_problem(problems)
    assert found == (
        replace(slow, disk_write_bytes_per_second=2.0),
        Budget(device_bytes=ALWAYS + 2000 + 8500, host_bytes=70, disk_bytes=5),
    )
    other = replace(COSTS, classes=(replace(CALL, input_bytes=1),))
    assert common_problem([*problems, (other, problems[0][1])]) is None
    with pytest.raises(StorageError, match="different sizes on processes that share the tokens"):
        common_problem([*problems, (other, problems[0][1])], common_bounds=True)


@pytest.mark.parametrize("sharing", ["the same", "different"])
def test_only_processes_that_share_tokens_need_the_same_sizes(sharing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data-parallel processes may get batches of other lengths."""
    other = replace(COSTS, classes=(replace(CALL, input_bytes=1),))
    budget = Budget(device_bytes=ALWAYS + 8500, host_bytes=70)

    class Others:
        def gather(self, value: Any, everyone: bool = True) -> list[Any]:
            if not isinstance(value, tuple):
                return [value]
            return [value, (other if everyone or sharing == "different" else COSTS, budget)]

        gather_slicing, stages = gather, None

        def run_alike(self, work: Callable[[], Any], everyone: bool = True) -> Any:
            return work()

    step: Any = SimpleNamespace(
        profile=None, costs=LAYERS, budget=Budget(device_bytes=ALWAYS + 8500, host_bytes=70), label=LABEL
    )
    monkeypatch.setattr(planning, "plain_plan", lambda *_: None)
    monkeypatch.setattr(planning, "_problem", lambda *_: ((COSTS, budget), []))
    monkeypatch.setattr(planning._Solver, "solve_alike", lambda self, costs, budget: costs)

    def plan(divided: bool) -> Any:
        ranks: Any = Others()
        return plan_by_kind(
            step, ranks, True, device_measured=False, divided=divided, exchanging=False, joint_attention=False
        )

    assert plan(divided=False) == COSTS
    if sharing == "the same":
        assert plan(divided=True) == COSTS
    else:
        assert plan(divided=True) is None


def test_some_of_the_free_device_memory_is_left() -> None:
    left = with_spare_device(Budget(device_bytes=ALWAYS + 10_000, host_bytes=7), LAYERS)
    assert left == Budget(device_bytes=ALWAYS + 9000, host_bytes=7)
    too_little = Budget(device_bytes=1200, host_bytes=7)
    assert with_spare_device(too_little, LAYERS) == too_little


# ---- tables


@pytest.fixture
def text() -> str:
    budget = Budget(device_bytes=ALWAYS + 150 * MIB, host_bytes=60 * MIB)
    plan = planned(budget, unit=64)
    return plan.explain()


def test_the_table_shows_every_kind_and_what_binds(text: str) -> None:
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "by kind of tensor" in text
    assert any(row.startswith("0-5 layer input 3.9 MiB") for row in rows)
    assert any(row.startswith("of it up 15.6 MiB") for row in rows)
    binding = [row for row in rows if row.startswith("host memory 60 MiB")]
    assert binding and "%" in binding[0]
    assert "Device memory and host memory limit a step, and 1 MiB more would make" in " ".join(
        text.replace("│", "").split()
    )
