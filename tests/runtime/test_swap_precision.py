"""`MemoStrategy(swap_precision="fp8")` from a profiled step to a trained model: plans, messages, several processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from rich.console import Console
from support.devices import DEVICE
from support.families import PlainBlock, PlainModel
from support.parallel_training import Run, train_alone, train_together
from support.trainer_harness import LanguageModel, Result, fit, mixing_model, plain, shorten_measurements
from torch import nn
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.slot_layouts import DiskLayout
from lightning_memo.config import MemoConfig
from lightning_memo.reports.tables import plan_tables

# Relative errors of losses after two optimizer steps: about twice the largest of those that were measured.
NEAR = 1e-4


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shorten_measurements(monkeypatch)
    monkeypatch.chdir(tmp_path)


class Overflow(Callback):
    """Asserts after each batch that every tensor has found its place in a slot."""

    @override
    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        memory = trainer.strategy.engine.memory
        assert memory is None or memory.stats.overflow_bytes == 0


def train(family: Any = "llama_gqa", max_steps: int = 4, **settings: Any) -> Result:
    return fit(MemoStrategy(**settings), LanguageModel(family), max_steps=max_steps, callbacks=[Overflow()])


def assert_near(result: Result, exact: Result) -> None:
    """Assert that losses differ, but not by much. The first step is profiled, so that the second forward is exact."""
    assert result.losses[:2] == pytest.approx(exact.losses[:2], rel=1e-6)
    assert result.losses[2:] == pytest.approx(exact.losses[2:], rel=NEAR)
    assert result.losses[2:] != pytest.approx(exact.losses[2:], rel=1e-6)
    assert result.held == [0] * len(result.losses)


def test_a_plan_has_half_the_bytes() -> None:
    exact, compressed = (train(alpha=1.0, swap_precision=precision) for precision in ("exact", "fp8"))
    assert_near(compressed, exact)
    swaps = exact.plan.swap, compressed.plan.swap
    assert [swap.precision for swap in swaps] == ["exact", "fp8"]
    # In fp32, of which a quarter is left; inputs and what attention reads and returns is exact.
    assert swaps[1].host_bytes < 0.5 * swaps[0].host_bytes
    assert swaps[1].buffer_bytes < 0.5 * swaps[0].buffer_bytes
    costs = compressed.plan.costs
    assert costs.swapped_other_bytes is not None and costs.compress_seconds is not None
    assert all(0 < moved < others for moved, others in zip(costs.swapped_other_bytes, costs.other_bytes, strict=True))
    assert min(costs.compress_seconds) > 0 and min(costs.restore_seconds or (0,)) > 0


def test_alpha_grows_with_the_same_host_memory() -> None:
    exact, compressed = (train(alpha="auto", storage="alpha", **BUDGET, swap_precision=p) for p in ("exact", "fp8"))
    assert exact.plan.swap.alpha < 1
    # Unless this machine recomputes the tiny layers faster than it compresses them.
    reason = compressed.plan.reason
    assert compressed.plan.swap.alpha > exact.plan.swap.alpha or reason.startswith("Recomputation is faster")


# Less than plain training needs of the device, and less than two layers save of the host.
BUDGET = {"device_memory": "1.18MiB", "host_memory": "100KiB"}


def test_kinds_of_tensors() -> None:
    exact = plain(LanguageModel("llama_gqa"))
    result = train(storage="kinds", **BUDGET, swap_precision="fp8")
    assert result.losses == pytest.approx(exact.losses, rel=NEAR)
    swap, costs = result.plan.swap, result.plan.storage_costs
    assert not swap.storage.has_one_alpha and costs is not None
    assert 0 < swap.host_bytes <= 100 * 1024
    assert result.plan.device_bytes <= result.plan.budget.device_bytes
    (call,) = costs.classes
    assert call.swapped_other_bytes is not None and call.sizes_in("device")[2] == call.other_bytes
    assert call.sizes_in("host")[2] == call.sizes_in("disk")[2] == call.swapped_other_bytes < call.other_bytes


def test_nothing_is_swapped_by_plain_training() -> None:
    result = train(swap_precision="fp8")
    assert result.plan.swap.plain
    assert result.losses == plain(LanguageModel("llama_gqa")).losses


def text_of(plan: Plan) -> str:
    console = Console(record=True, width=200)
    console.print(*plan_tables(plan))
    return console.export_text()


def test_the_printed_plan_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    result = train(alpha=0.5, swap_precision="fp8")
    assert "activations swapped in fp8" in text_of(result.plan)
    assert "activations swapped in fp8" in " ".join(capsys.readouterr().out.split())
    assert "fp8" not in text_of(train(alpha=0.5).plan)


@pytest.mark.slow
def test_saved_plans_are_for_one_precision(tmp_path: Path) -> None:
    first = train(alpha=0.5, swap_precision="fp8")
    path = tmp_path / "plan.json"
    first.plan.save(path)
    assert Plan.load(path) == first.plan
    again = train(plan=path, swap_precision="fp8")
    assert again.plan.swap == first.plan.swap
    with pytest.warns(UserWarning, match=r"is not used, and the first batch is profiled: it was made for swap_prec"):
        other = train(plan=path, alpha=0.5)
    assert other.plan.swap.precision == "exact"


def test_layers_that_run_whole_are_swapped_exactly() -> None:
    exact = train(mixing_model, alpha=0.5)
    with pytest.warns(UserWarning, match=r'swap_precision="fp8" compresses nothing, because layers run as one slice: '):
        result = train(mixing_model, alpha=0.5, swap_precision="fp8")
    assert result.losses == exact.losses
    assert result.plan.swap.host_bytes == exact.plan.swap.host_bytes
    assert result.plan.costs.swapped_other_bytes is None
    assert "fp8" not in text_of(result.plan)


def test_planned_memory() -> None:
    """Tensors that are restored are requests like others: a memory plan has places for them."""
    result = train(alpha=1.0, swap_precision="fp8", max_steps=9)
    exact = train(alpha=1.0, max_steps=9)
    assert result.losses == pytest.approx(exact.losses, rel=10 * NEAR)
    if DEVICE.type == "cuda":
        memory = result.trainer.strategy.memory
        assert memory is not None and memory.use is not None


def eight_blocks() -> nn.Module:
    return PlainModel([PlainBlock() for _ in range(8)])


def test_a_disk(tmp_path: Path) -> None:
    exact = train(eight_blocks, alpha=1.0)
    settings = {"alpha": 1.0, "swap_precision": "fp8"}
    slot_bytes = train(eight_blocks, max_steps=1, **settings).plan.swap.memory.slot
    host_memory = 2 * slot_bytes + DiskLayout(slot_bytes).bounce_bytes
    spilled = train(eight_blocks, **settings, disk_path=tmp_path, host_memory=host_memory)
    assert len(spilled.plan.swap.disk_calls) == 4
    assert_near(spilled, exact)


def test_slices_on_the_host() -> None:
    exact = train(alpha=1.0)
    sliced = train(alpha=1.0, swap_precision="fp8", slice_tokens=8, host_backed="all")
    assert sliced.losses == pytest.approx(exact.losses, rel=NEAR)


CONFIGURATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2 zero3": (2, {"zero_stage": 3}),
    "cp2 ulysses": (2, {"context_parallel_size": 2, "ulysses_size": 2}),
    "cp2 slices": (2, {"context_parallel_size": 2, "slice_tokens": 8, "host_backed": "attention",
                       "ulysses_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "tp2 x cp2": (4, {"tensor_parallel_size": 2, "context_parallel_size": 2, "ulysses_size": 2}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_several_processes_with_accumulation(name: str) -> None:
    size, settings = CONFIGURATIONS[name]
    run = Run(family="llama_gqa", batch=4, accumulate=2)
    errors = train_together(size, run, settings | {"alpha": 0.5, "swap_precision": "fp8"}).worst_error(train_alone(run))
    assert errors["loss"] <= NEAR, errors
    assert errors["norm"] + errors["gradients"] > 1e-4, errors  # it is used


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match='swap_precision=\'int8\' is not known: give one of "exact", "fp8"'):
        MemoConfig(swap_precision="int8")
    with pytest.raises(ValueError, match="swap_precision=None is not known"):
        MemoConfig(swap_precision=None)  # type: ignore[arg-type]
