"""Plans and steps keep within the user's device budget, or one line says how much is missing."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from support.modes import BY_ALPHA, BY_KIND
from support.trainer_harness import LanguageModel, fit, loader, shorten_measurements
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.plan import Plan
from lightning_memo.profiler import measured_costs
from lightning_memo.profiler.memory_meter import Precedence
from lightning_memo.runtime.step_meter import StepMeter

TOKENS = 96


@pytest.fixture(autouse=True)
def quick(monkeypatch: Any, own_folder: Any) -> None:
    shorten_measurements(monkeypatch)


class Peak(Callback):
    """The peak of the third batch, which the package itself does not measure."""

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.meter = StepMeter(trainer.strategy.engine, Precedence.LATER_STEP) if batch_idx == 2 else None

    @override
    def on_before_backward(self, *args: Any) -> None:
        if self.meter is not None:
            self.meter.begin_backward()

    @override
    def on_after_backward(self, *args: Any) -> None:
        if self.meter is not None:
            self.meter.end_backward()

    @override
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if self.meter is not None:
            measured, plan = self.meter.stop(accumulating=False), trainer.strategy.plan
            assert measured is not None
            always = plan.costs.fixed_device_bytes + plan.swap.memory.buffer_bytes
            self.bytes = always + max(measured.layers, measured.outside)


def train(steps: int = 3, **settings: Any) -> tuple[Plan, int, list[str]]:
    """The plan, the peak of a step, and the lines about device memory that is missing."""
    peak = Peak()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = MemoStrategy(**settings)
        fit(strategy, LanguageModel("llama"), loader(2 * steps, TOKENS), max_steps=steps, callbacks=[peak])
    told = [str(each.message) for each in caught if "more than the budget of" in str(each.message)]
    return strategy.plan, peak.bytes, told


@pytest.mark.slow
@pytest.mark.parametrize("plans", ["alpha", "kinds"])
def test_every_budget_is_kept_or_told_of(plans: str) -> None:
    """Budgets from the need of alpha 0 to that of plain training, and one byte below the least."""
    least = train(alpha=0.0)[0].device_bytes
    most = train(device_memory="1GiB")[0].device_bytes
    test_mode = BY_ALPHA if plans == "alpha" else BY_KIND
    first = least - 1 if plans == "alpha" else least
    budgets = [first, least, *range(least, most, (most - least) // 3), most - 1, most]
    for device_bytes in budgets:
        plan, peak_bytes, told = train(test_mode=test_mode, device_memory=device_bytes)
        assert plan.budget.device_bytes == device_bytes
        assert plan.device_excess_bytes == max(least - device_bytes, 0)
        assert len(told) == (max(plan.device_bytes, peak_bytes) > device_bytes), (device_bytes, peak_bytes, told)
        assert (plan.swap.plain) == (device_bytes >= most)


@pytest.mark.slow
def test_a_larger_budget_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_costs, "copy_bandwidth", lambda *arguments: (1e12, 1e12))  # on a busy machine, too
    least, most = (train(alpha=alpha)[0].device_bytes for alpha in (0.0, 1.0))
    budgets = [least, (least + most) // 2, most]
    alphas = [train(device_memory=device_bytes)[0].swap.alpha for device_bytes in budgets]
    assert all(a < b for a, b in pairwise(alphas)), alphas


class FirstStep(Callback):
    """The host memory of the step that is profiled."""

    @override
    def on_after_backward(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.plan is None:
            memory = trainer.strategy.engine.memory
            self.host_bytes, self.device_bytes = memory.host_bytes, memory.device_bytes
            assert memory.stats.unplanned_slots == memory.stats.overflow_bytes == 0


@pytest.mark.slow
def test_the_first_step_keeps_within_the_host_budget() -> None:
    """Attention outputs that the host does not hold are computed again, and layer inputs stay on the device.

    Plans expect to compute the outputs again: they may drop them, too. Inputs are not taken for memory that every step
    needs.
    """
    budgets: dict[str, Any] = {"device_memory": train(device_memory="1GiB")[0].device_bytes - 1, "test_mode": BY_KIND}
    seen = []
    for host_memory in ("1GiB", 2**15, 1):
        first, module = FirstStep(), LanguageModel("llama")
        strategy = MemoStrategy(host_memory=host_memory, **budgets)
        fit(strategy, module, loader(6, TOKENS), max_steps=3, callbacks=[first])
        seen.append((first, strategy.plan.costs, module.state_dict()))
    (enough, costs, expected), *limited = seen
    assert enough.host_bytes > 2**15 and enough.device_bytes == 0
    for (first, own, weights), most in zip(limited, (2**15, 1), strict=True):
        assert first.host_bytes <= most and 0 < first.host_bytes + first.device_bytes < enough.host_bytes
        assert (first.host_bytes > 0) == (most > 1)
        attention_bytes = 4 * (32 + 4) * 2 * TOKENS  # the outputs of 32 channels and log-sum-exps of 4 heads
        assert own.backward_device_bytes == pytest.approx(costs.backward_device_bytes + attention_bytes, rel=0.02)
        assert own.transient_device_bytes == pytest.approx(costs.transient_device_bytes, rel=0.02)
        assert all(torch.allclose(t, expected[name], rtol=0, atol=1e-6) for name, t in weights.items())


def test_a_given_plan_is_told_of_by_what_there_is_now(capsys: Any) -> None:
    made = train(alpha=1.0, device_memory="1GiB")[0]
    made.save("given.json")
    capsys.readouterr()
    now, _, told = train(plan="given.json", device_memory=made.device_bytes - 2**10)
    assert now.swap == made.swap
    assert told and "this plan needs" in told[0] and "1.0 KiB more than the budget" in told[0]
    assert "over by 1.0 KiB" in " ".join(capsys.readouterr().out.replace("│", "").split())


@pytest.mark.slow
def test_an_arena_that_is_larger_than_what_lives_in_it_is_told_of() -> None:
    class Wait(Callback):
        @override
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            while trainer.strategy.memory.busy:
                time.sleep(0.01)

    strategy = MemoStrategy(alpha=0.0, plan_memory=True)
    fit(strategy, LanguageModel("llama"), loader(32, TOKENS), max_steps=12, callbacks=[Wait()])
    plan = strategy.plan
    assert plan is not None and plan.placement is not None
    wide = replace(plan, placement=replace(plan.placement, peak_bytes=plan.placement.peak_bytes + 2**20))
    for made, missing in ((plan, False), (wide, True)):
        made.save("given.json")
        budget = plan.device_bytes + 2**18
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            again = MemoStrategy(plan="given.json", device_memory=budget, plan_memory=True)
            fit(again, LanguageModel("llama"), loader(32, TOKENS), max_steps=12, callbacks=[Wait()])
        assert again.memory is not None and again.memory.stats is not None
        assert any("a step takes" in str(each.message) for each in caught) == missing
