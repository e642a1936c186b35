"""Plans of processes that share experts: one for all of them, with the costs of what they send each other."""

from __future__ import annotations

import time
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback
from support.architectures.mixtures import deepseek_v3, lopsided
from support.markers.slow import slow_if
from support.modes import BY_KIND
from support.parallel_training import Run, train, train_alone, train_together
from support.processes import run_in_processes
from support.samples.collectives import Counting
from support.samples.configurations import BOUND
from typing_extensions import override

from lightning_memo.parallel.tensor import experts
from lightning_memo.planner.token_slices import slices_of

_EP2 = {"expert_parallel_size": 2}
_CP2, _TP2 = {"context_parallel_size": 2}, {"tensor_parallel_size": 2}
_SLOW_SECONDS = 0.2


def _plan_by_kind(trainer: Any) -> dict[str, Any]:
    storage = trainer.strategy.plan.swap.storage
    return {"calls": None if storage is None else (storage.calls, storage.call_classes)}


KINDS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "all tokens to one": (2, lopsided, {"device_memory": "5MiB"}),
    "little host": (2, deepseek_v3, {"device_memory": "3.5MiB", "host_memory": "1MiB"}),
    "shared sequences": (2, "qwen3_moe", _CP2 | {"device_memory": "2.4MiB"}),
    "beside tensor parallelism": (4, deepseek_v3, _TP2 | {"device_memory": "3MiB", "sequence_parallel": False}),
    "two groups": (4, "qwen3_moe", {"zero_stage": 3, "device_memory": "2.5MiB"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", KINDS)
def test_plans_by_kind_of_tensor(case: str) -> None:
    """All processes have one plan, whatever their loads are."""
    size, family, settings = KINDS[case]
    run = Run(family=family, tokens=300, batch=size, steps=3, layers=4)
    together = train_together(size, run, _EP2 | settings | {"test_mode": BY_KIND}, _plan_by_kind)
    plans = together.notes["calls"]
    assert plans[0] is not None and all(plan == plans[0] for plan in plans)
    errors = together.worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in ("loss", "norm", "gradients")), errors


class ChangingLoads(Callback):
    """From the third batch on, all tokens go to the first two experts."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        for m in module.modules() if batch_idx == 2 else ():
            if hasattr(m, "e_score_correction_bias"):
                m.e_score_correction_bias[:2] += 10.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{"alpha": 1.0, "plan_memory": True}, {"test_mode": BY_KIND, "device_memory": "4MiB"}],
    ids=["alpha", "kinds"],
)
def test_plans_for_even_loads_run_with_uneven_ones(settings: dict[str, Any]) -> None:
    run = Run(family=deepseek_v3, tokens=300, steps=4, layers=5)
    alone = run_in_processes(1, train, run, {"alpha": 1.0}, None, ChangingLoads)[0]
    together = train_together(2, run, _EP2 | settings, watch=ChangingLoads)
    assert together.losses == pytest.approx(alone.losses, rel=1e-6)
    assert together.norms == pytest.approx(alone.norms, rel=BOUND)


class Exchanges(Callback):
    """Counts the all-to-alls of a step."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}
        self._counting = Counting()

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:  # steps 1 and 2 compare slices
            self._counting.__enter__()

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._counting.__exit__(None, None, None)
            self.notes["exchanges"] = self._counting.counts["alltoall_base_"]


@slow_if(lambda alpha: alpha == 0)
@pytest.mark.parametrize(("alpha", "again"), [(1.0, 0), (0.0, 4)])
def test_results_of_exchanges_that_are_stored_are_not_sent_again(alpha: float, again: int) -> None:
    """Sent are numbers of rows, hidden states, choices and weights, and results; and the gradients of three of them.

    A recomputation sends all but the results.
    """
    run = Run(family="qwen3_moe", tokens=32, steps=3, layers=4)
    notes = train_together(2, run, _EP2 | {"alpha": alpha, "check_slices": False}, watch=Exchanges).notes
    assert notes["exchanges"] == [4 * (5 + 3) + 4 * again] * 2


def _recomputed_slices(trainer: Any) -> dict[str, Any]:
    storage = trainer.strategy.plan.swap.storage
    slices = [part for call in range(4) for part in slices_of(storage, call, 300)]
    return {"recomputed": sum(part.recomputes for part in slices), "slices": len(slices)}


@pytest.mark.slow
def test_plans_by_kind_repeat_the_exchanges_of_recomputed_slices_only() -> None:
    run = Run(family="qwen3_moe", tokens=300, steps=3, layers=4)
    settings = _EP2 | {"test_mode": BY_KIND, "device_memory": "3MiB", "check_slices": False}
    notes = train_together(2, run, settings, _recomputed_slices, watch=Exchanges).notes
    slices, again = notes["slices"][0], notes["recomputed"][0]
    assert 0 < again < slices
    assert notes["exchanges"] == [slices * (5 + 3) + again * 4] * 2


class SlowExchanges(Callback):
    """Each exchange takes longer than everything else."""

    notes: ClassVar[dict[str, Any]] = {}

    @override
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        exchange = experts._exchange

        def slowly(*args: Any) -> torch.Tensor:
            time.sleep(_SLOW_SECONDS)
            return exchange(*args)

        self._patch = mock.patch.object(experts, "_exchange", slowly)
        self._patch.start()

    @override
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._patch.stop()


def _costs(trainer: Any) -> dict[str, Any]:
    return {"costs": trainer.strategy.plan.storage_costs, "bytes": sum(trainer.strategy.plan.costs.other_bytes)}


@pytest.mark.slow
def test_the_costs_of_layers_include_exchanges() -> None:
    """Four in the forward (hidden states, choices, weights and results), three in each of the other two."""
    run = Run(family="qwen3_moe", tokens=300, steps=1, layers=4)
    settings = _EP2 | {"test_mode": BY_KIND, "device_memory": "3MiB", "check_slices": False}
    (call,) = train_together(2, run, settings, _costs, watch=SlowExchanges).notes["costs"][0].classes
    assert 4 * _SLOW_SECONDS < call.forward_seconds < 6 * _SLOW_SECONDS
    assert 3 * _SLOW_SECONDS < call.elementwise_seconds < 5 * _SLOW_SECONDS
    assert 3 * _SLOW_SECONDS < call.backward_seconds < 5 * _SLOW_SECONDS


@pytest.mark.slow
def test_divided_experts_save_what_whole_ones_do() -> None:
    """Except for some numbers for each row."""
    run, settings = Run(family="qwen3_moe", tokens=300, steps=1, layers=4), {"alpha": 0.5}
    whole, divided = (sum(train_together(2, run, s, _costs).notes["bytes"]) for s in (settings, settings | _EP2))
    rows = 4 * 2 * 300 * 2
    assert whole <= divided <= whole + 32 * rows
