"""From a profiled step to a plan by kinds of tensors, which all processes agree on."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from lightning_memo.artifacts.layer_costs import Budget
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.storage_budget import StorageBudget
from lightning_memo.artifacts.swap_plan import Schedule
from lightning_memo.artifacts.tensor_kind_costs import StorageCosts
from lightning_memo.parallel.ranks import Ranks
from lightning_memo.planner.alpha.plain_training import plain_plan
from lightning_memo.planner.device_budget import with_spare_device
from lightning_memo.planner.storage.plan_storage_kinds import common_problem, plan_kinds
from lightning_memo.planner.storage.storage_plan_slices import stored_bytes_of_calls
from lightning_memo.planner.storage.uneven_loads import largest_loads, largest_saved
from lightning_memo.planner.token_slices import SavedBytes, tile_of
from lightning_memo.profiler.measured_costs import measured_call_costs
from lightning_memo.runtime.activation_plans.measured_step import MeasuredStep

_ATTEMPTS: Final = 8


def plan_by_kind(
    step: MeasuredStep,
    ranks: Ranks,
    everyone: bool,
    *,
    device_measured: bool,
    optional: bool,
    divided: bool,
    exchanging: bool,
    schedule: Schedule,
) -> Plan | None:
    """Plan plain training if every process has memory for it, otherwise solve the linear program over tensor kinds.

    Processes whose layers save the same bytes, or that share experts, solve the same program, with the costs of the
    slowest process, the largest load and the smallest budget: they get the same plan. Others get plans of their own. So
    do the stages of a pipeline; with sequence parallelism each cuts its layers where any other one does.

    Args:
        step: The measured step.
        ranks: The processes that have to agree.
        everyone: Whether all processes agree, or only those that work on the same sequences.
        device_measured: Whether the device budget is the memory that was free, rather than the user's setting.
        optional: Whether there is another way to plan.
        divided: Whether processes share the tokens of a sequence, and therefore run all layers in the same slices.
        exchanging: Whether processes share experts, and therefore run each layer in the same slices.
        schedule: The order in which slices run, "layer" or "nest".

    Returns:
        The plan; `None` if it is optional, and some process finds none.

    Raises:
        ValueError: Some process finds no plan.
    """
    plain = plain_plan(step.costs, step.budget, step.label, schedule)
    if all(ranks.gather_slicing(plain is not None, everyone)) and plain is not None:
        return plain
    limits = with_spare_device(step.budget, step.costs) if device_measured else step.budget
    own, saved = _problem(step, limits, ranks, everyone, exchanging)
    common = common_problem(ranks.gather(own, everyone))
    sharing = [] if common else ranks.gather(own, everyone=False)  # which may agree where not all do
    solver = _Solver(step, saved, divided, schedule, ranks, everyone)
    try:
        problem = ranks.run_alike(lambda: common or common_problem(sharing, divided or exchanging) or own, everyone)
        return solver.solve_alike(*problem)
    except ValueError:
        if optional:
            return None
        raise


def _problem(
    step: MeasuredStep, limits: Budget, ranks: Ranks, everyone: bool, exchanging: bool
) -> tuple[tuple[StorageCosts, StorageBudget], list[list[SavedBytes]]]:
    """Return the costs and the budget, and the tensors that each call saves; with experts, of the largest load."""
    calls = measured_call_costs(step.profile, step.costs)
    saved = [[*call.saved, *(product.saved for product in call.products)] for call in step.profile.in_order()]
    if exchanging:
        of_calls, of_saved = zip(*ranks.gather((calls, saved), everyone), strict=True)
        calls, saved = largest_loads([calls, *of_calls]), largest_saved(of_saved)
    return (StorageCosts.of_step(calls, step.costs), StorageBudget.of(limits, step.costs)), saved


@dataclass(frozen=True, slots=True)
class _Solver:
    """What plans of a step are solved from, apart from the costs and the budget; see `plan_by_kind`."""

    step: MeasuredStep
    saved: list[list[SavedBytes]]
    divided: bool
    schedule: Schedule
    ranks: Ranks
    everyone: bool

    def solve_alike(self, costs: StorageCosts, budget: StorageBudget) -> Plan:
        """Solve until all stages of a pipeline cut their layers into the same slices, if they have to.

        Raises:
            ValueError: Some process finds no plan, or bounds of slices differ each time.
        """
        bounds: set[int] = set()
        for _ in range(_ATTEMPTS):
            common = bounds if self.divided else None
            plan = self.ranks.run_alike(functools.partial(self._solve, costs, budget, common), self.everyone)
            assert plan.swap.storage is not None
            own = {bound for call in plan.swap.storage.calls for bound in call.bounds}
            of_all = self.ranks.gather_slicing(own, self.everyone) if self.ranks.stages is not None else [own]
            if all(each == own for each in of_all):
                return plan
            bounds = bounds.union(*of_all)  # with which other shares may be best, as more slices need more bytes
        raise ValueError(
            'the stages of the pipeline find no common slices: set storage="alpha", or sequence_parallel=False'
        )

    def _solve(self, costs: StorageCosts, budget: StorageBudget, common_bounds: Collection[int] | None) -> Plan:
        step, tokens = self.step, self.step.profile.tokens
        return plan_kinds(
            step.costs,
            costs,
            budget,
            step.label,
            tile_tokens=tile_of(tokens),
            stored_bytes=lambda plan: stored_bytes_of_calls(plan, self.saved, tokens, costs.leaving_calls),
            common_bounds=common_bounds,
            nested=self.schedule == "nest",
        )
