"""Makes the plan of a profiled step, which all processes agree on."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_memo.artifacts.costs import Budget, LayerCosts, StorageCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan, PlanMemory, Schedule, StorageBudget, StoragePlan
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.engine.bootstrap_plan import host_backed_bytes
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.parallel.ranks import Ranks, agree_on_plan
from lightning_memo.planner import plan_swap
from lightning_memo.planner.choose_plan import plain_plan, with_spare_device
from lightning_memo.planner.host_backed_sizes import StreamedBytes
from lightning_memo.planner.plan_storage_kinds import common_problem, largest_loads, largest_saved, plan_kinds
from lightning_memo.planner.step_time import steady
from lightning_memo.planner.token_slices import SavedBytes, memory_of_plan, plan_of_alpha, share, slot_bytes, tile_of
from lightning_memo.profiler.measured_costs import measured_call_costs

_MOST_SHARE: Final = 0.9  # of the device's budget: the step that is estimated has not run
_ATTEMPTS: Final = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """A profiled step, its costs, and the memory that a plan for such steps may use."""

    profile: StepProfile
    costs: LayerCosts
    budget: Budget
    label: Fingerprint
    """What a plan that is made from the step is valid for."""


def return_keys(step: MeasuredStep, engine: Engine, alpha: float | str) -> bool:
    """Let the next batch be profiled with keys and values on the device, where slices are faster.

    Args:
        step: The step that was measured.
        engine: The engine that profiled it.
        alpha: The user's alpha, or "auto".

    Returns:
        False if keys and values stay where they are: the user decided it, layers run whole, or the device has no room.
    """
    settings, swap = engine.settings, engine.swap
    chosen = settings.host_backed == "auto" and swap is not None and swap.streamed
    if not chosen or settings.slice_tokens is None or engine.layer_classes.unsliceable:
        return False
    if _device_bytes(step, engine, 0.0 if alpha == "auto" else float(alpha)) > _MOST_SHARE * step.budget.device_bytes:
        return False
    engine.cut(settings.slice_tokens, "none")
    rank_zero_info(
        "lightning_memo: the device has room for keys and values, with which slices are faster; the next batch is "
        "profiled again."
    )
    return True


def _device_bytes(step: MeasuredStep, engine: Engine, alpha: float) -> int:
    """Device memory of a step whose layers keep keys and values, their gradients and whole slots there.

    A profile may have measured fewer tokens than a layer call has.
    """
    profile, costs, most = step.profile, steady(step.costs), engine.settings.slice_tokens
    multiple, calls = engine.cutter.multiple, profile.saved_by_calls
    plan = plan_of_alpha(profile.tokens, alpha, slice_tokens=most, multiple=multiple)
    slices = engine.cutter.slices(plan, profile.tokens)
    slot = max(slot_bytes(saved, tokens, slices, "layer") for saved, tokens in calls)
    keys = max(
        sum(share(item, profile.tokens, tokens) for item in saved if item.kind in ("key", "value"))
        for saved, tokens in calls
    )
    gradients = max(traits.key_value_gradient_bytes / traits.tokens for traits in engine.layer_classes)
    working = (
        costs.working_bytes_with(plan.recomputed_bytes(costs.other_bytes)) + keys + int(gradients * profile.tokens)
    )
    return costs.fixed_device_bytes + working + 2 * slot


def plan_by_alpha(
    step: MeasuredStep, engine: Engine, config: MemoConfig, most_alpha: float, ranks: Ranks, everyone: bool
) -> Plan:
    """Solve for alpha, the fraction of the tokens whose activations are swapped (MEMO, section 4.2).

    Args:
        step: The measured step.
        engine: The engine that profiled the step.
        config: The settings of the strategy.
        most_alpha: Upper limit of alpha.
        ranks: The processes that have to agree.
        everyone: Whether all processes agree, or only those that work on the same sequences.

    Raises:
        ValueError: Some process finds no plan, or some layer cannot run by the settings.
    """
    return agree_on_plan(_AlphaPlanner(step, engine, config, most_alpha).solve, ranks, everyone)


class _AlphaPlanner:
    def __init__(self, step: MeasuredStep, engine: Engine, config: MemoConfig, most_alpha: float) -> None:
        assert engine.swap is not None
        self._step, self._engine, self._config, self._most_alpha = step, engine, config, most_alpha
        self._backing = engine.swap.host_backed
        self._slice_tokens = engine.settings.slice_tokens

    def solve(self, alpha: float | None, may_be_plain: bool) -> Plan:
        """The plan of this process for an alpha; `None` is the user's.

        Raises:
            ValueError: Some layer cannot run slice after slice, and `host_backed` puts keys and values on the host.
        """
        if why := self._engine.layer_classes.unsliceable:
            self._backing = self._engine.settings.backing_of_whole_layers(self._backing, why)
        plan = self._plan_at(self._config.alpha if alpha is None else alpha, may_be_plain)
        return plan if plan.swap.alpha <= self._most_alpha else self._plan_at(self._most_alpha, may_be_plain)

    def _plan_at(self, alpha: float | str, may_be_plain: bool) -> Plan:
        return plan_swap(
            self._step.costs,
            self._step.budget,
            self._step.label,
            alpha=alpha,
            schedule=self._engine.layer_classes.schedule,
            slice_tokens=self._slice_tokens,
            memory_of=self._memory_of,
            whole_layers=bool(self._engine.layer_classes.unsliceable),
            multiple=self._engine.cutter.multiple,
            # If the profiled step was cut into slices, the memory of a step without slices is not known.
            may_be_plain=may_be_plain and self._step.profile.slice_tokens == self._step.profile.tokens,
            host_backed=self._backing,
            streamed_bytes=None if self._backing == "none" else self._streamed_bytes,
        )

    def _memory_of(self, plan: StoragePlan) -> PlanMemory:
        """Memory of a plan if layer calls are swapped as a whole."""
        engine, calls = self._engine, self._step.profile.saved_by_calls
        schedule, multiple = engine.layer_classes.schedule, engine.cutter.multiple
        return memory_of_plan(plan, calls, self._step.costs.swapped_calls, schedule=schedule, multiple=multiple)

    def _streamed_bytes(self, plan: StoragePlan) -> StreamedBytes:
        """Memory of a plan if slices are swapped one by one."""
        slices = self._engine.cutter.slices(plan, plan.tokens)
        return host_backed_bytes(self._engine, self._step.profile.saved_by_calls, slices, self._backing)


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
        calls = [(saved, tokens) for saved in self.saved]
        return plan_kinds(
            step.costs,
            costs,
            budget,
            step.label,
            tile_tokens=tile_of(tokens),
            memory_of=lambda plan: memory_of_plan(plan, calls, costs.leaving_calls),
            common_bounds=common_bounds,
            nested=self.schedule == "nest",
        )
