"""Makes the plan of a profiled step, which all processes agree on."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from lightning_memo.artifacts.costs import Budget, CallCosts, LayerCosts, StorageCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.swap_plan import PlanMemory, StoragePlan
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine
from lightning_memo.engine.bootstrap_plan import may_run_again, streamed_bytes_of_calls
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.parallel.ranks import Ranks, agree_on_plan
from lightning_memo.planner import Restrictions, make_plan
from lightning_memo.planner.make_plan import plain_plan, with_spare_device
from lightning_memo.planner.storage_planner import StorageError
from lightning_memo.planner.streamed_bytes import StreamedBytes
from lightning_memo.planner.token_slices import SavedBytes, memory_of_plan, plan_of_alpha, share, slot_bytes
from lightning_memo.profiler.measured_costs import measured_call_costs
from lightning_memo.utils.messages import tell

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
    chosen = settings.stream_from_host == "auto" and swap is not None and swap.streamed
    if not chosen or settings.slice_tokens is None or engine.layer_classes.unsliceable:
        return False
    if _device_bytes(step, engine, 0.0 if alpha == "auto" else float(alpha)) > _MOST_SHARE * step.budget.device_bytes:
        return False
    engine.cut(settings.slice_tokens, "none")
    tell("the device has room for keys and values, with which slices are faster; the next batch is profiled again.")
    return True


def _device_bytes(step: MeasuredStep, engine: Engine, alpha: float) -> int:
    """Device memory of a step whose layers keep keys and values, their gradients and whole slots there.

    A profile may have measured fewer tokens than a layer call has.
    """
    profile, costs, most = step.profile, step.costs, engine.settings.slice_tokens
    multiple, calls = engine.cutter.multiple, profile.saved_by_calls
    plan = plan_of_alpha(profile.tokens, alpha, slice_tokens=most, multiple=multiple)
    slices = engine.cutter.slices(plan, profile.tokens)
    slot = max(slot_bytes(saved, tokens, slices) for saved, tokens in calls)
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
    settings, classes, cutter = engine.settings, engine.layer_classes, engine.cutter
    calls, slice_tokens = step.profile.saved_by_calls, settings.slice_tokens
    free = everyone or ranks.all_together  # otherwise, other processes gather weights for layers that run again, too

    def solve(alpha: float | None, may_be_plain: bool, segment_calls: int | None) -> Plan:
        """The plan of this process for an alpha and a size of segments; `None` is the user's, and the longest."""
        assert engine.swap is not None
        stream = engine.swap.stream_from_host
        if why := classes.unsliceable:
            stream = settings.streamed_by_whole_layers(stream, why)

        def memory_of(plan: StoragePlan) -> PlanMemory | StreamedBytes:
            if stream != "none":
                slices = cutter.slices(plan, plan.tokens)
                return streamed_bytes_of_calls(engine, calls, slices, stream, plan.segments)
            joint, leaving = classes.joint_attention, step.costs.swapped_calls
            return memory_of_plan(plan, calls, leaving, joint_attention=joint, multiple=cutter.multiple)

        restrictions = Restrictions(
            alpha=config.alpha if alpha is None else alpha,
            most_alpha=most_alpha,
            joint_attention=classes.joint_attention,
            slice_tokens=slice_tokens,
            whole_layers=bool(classes.unsliceable),
            multiple=cutter.multiple,
            # If the profiled step was cut into slices, the memory of a step without slices is not known.
            may_be_plain=may_be_plain and step.profile.slice_tokens == step.profile.tokens,
            stream_from_host=stream,
            may_run_again=free and may_run_again(stream, step.costs.in_flight),
            segment_calls=segment_calls or (None if free else engine.segment_calls),
        )
        return make_plan(step.costs, step.budget, step.label, restrictions, memory_of)

    return agree_on_plan(solve, ranks, everyone)


def plan_by_kind(
    step: MeasuredStep,
    ranks: Ranks,
    everyone: bool,
    *,
    device_measured: bool,
    divided: bool,
    exchanging: bool,
    joint_attention: bool,
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
        divided: Whether processes share the tokens of a sequence, and therefore run all layers in the same slices.
        exchanging: Whether processes share experts, and therefore run each layer in the same slices.
        joint_attention: Whether attention runs over all slices of a layer at once.

    Returns:
        The plan; `None` if some process finds none.
    """
    plain = plain_plan(step.costs, step.budget, step.label)
    if all(ranks.gather_slicing(plain is not None, everyone)) and plain is not None:
        return plain
    limits = with_spare_device(step.budget, step.costs) if device_measured else step.budget
    own, saved = _problem(step, limits, ranks, everyone, exchanging)
    common = common_problem(ranks.gather(own, everyone))
    sharing = [] if common else ranks.gather(own, everyone=False)  # which may agree where not all do
    solver = _Solver(step, saved, divided, joint_attention, ranks, everyone)
    try:
        problem = ranks.run_alike(lambda: common or common_problem(sharing, divided or exchanging) or own, everyone)
        return solver.solve_alike(*problem)
    except ValueError:
        return None


def _problem(
    step: MeasuredStep, limits: Budget, ranks: Ranks, everyone: bool, exchanging: bool
) -> tuple[tuple[StorageCosts, Budget], list[list[SavedBytes]]]:
    """Return the costs and the budget, and the tensors that each call saves; with experts, of the largest load."""
    calls = measured_call_costs(step.profile, step.costs)
    saved = [[*call.saved, *(product.saved for product in call.products)] for call in step.profile.in_order()]
    if exchanging:
        of_calls, of_saved = zip(*ranks.gather((calls, saved), everyone), strict=True)
        calls, saved = largest_loads([calls, *of_calls]), largest_saved(of_saved)
    return (StorageCosts.of_step(calls, step.costs), limits), saved


@dataclass(frozen=True, slots=True)
class _Solver:
    """What plans of a step are solved from, apart from the costs and the budget; see `plan_by_kind`."""

    step: MeasuredStep
    saved: list[list[SavedBytes]]
    divided: bool
    joint_attention: bool
    ranks: Ranks
    everyone: bool

    def solve_alike(self, costs: StorageCosts, budget: Budget) -> Plan:
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
        raise ValueError("the stages of the pipeline find no common slices")

    def _solve(self, costs: StorageCosts, budget: Budget, common_bounds: Collection[int] | None) -> Plan:
        step, tokens = self.step, self.step.profile.tokens
        calls = [(saved, tokens) for saved in self.saved]
        restrictions = Restrictions(
            kinds=costs, joint_attention=self.joint_attention, common_bounds=common_bounds, may_be_plain=False
        )
        return make_plan(
            step.costs,
            budget,
            step.label,
            restrictions,
            lambda plan: memory_of_plan(plan, calls, costs.swapped_calls),
        )


def common_problem(
    problems: Sequence[tuple[StorageCosts, Budget]], common_bounds: bool = False
) -> tuple[StorageCosts, Budget] | None:
    """Combine the processes' problems: the costs of the slowest process and the smallest budget.

    Args:
        problems: Costs and budget of each process.
        common_bounds: Whether the layers of all processes run in the same slices.

    Returns:
        The common costs and budget; None if the layers of the processes save different sizes.

    Raises:
        StorageError: Layers that have to run in the same slices save different sizes.
    """
    sizes = [(costs.call_classes, [(call.kinds, call.sizes) for call in costs.classes]) for costs, _ in problems]
    if any(size != sizes[0] for size in sizes):
        if common_bounds:
            raise StorageError(
                "layers save tensors of different sizes on processes that share the tokens of a sequence or experts, "
                "and have to run in the same slices"
            )
        return None
    slowest = max((costs for costs, _ in problems), key=_compute_seconds)
    budgets = [budget for _, budget in problems]
    least = min(
        limits.device_bytes - costs.fixed_device_bytes - costs.transient_device_bytes for costs, limits in problems
    )
    slowest = replace(
        slowest,
        # What is not recomputed lowers the peak of each process, at least by this.
        recomputed_device_bytes=min(costs.recomputed_device_bytes for costs, _ in problems),
        disk_write_bytes_per_second=min(costs.disk_write_bytes_per_second for costs, _ in problems),
        disk_read_bytes_per_second=min(costs.disk_read_bytes_per_second for costs, _ in problems),
    )
    return slowest, Budget(
        device_bytes=max(slowest.fixed_device_bytes + slowest.transient_device_bytes + least, 0),
        host_bytes=min(budget.host_bytes for budget in budgets),
        disk_bytes=min(budget.disk_bytes for budget in budgets),
    )


def _compute_seconds(costs: StorageCosts) -> float:
    return sum(costs.classes[n].forward_seconds + costs.classes[n].backward_seconds for n in costs.call_classes)


def largest_loads(calls: Sequence[Sequence[CallCosts]]) -> list[CallCosts]:
    """Return the costs of each layer call, with the sizes of the largest load.

    Calls that differ only in what is neither input, nor attention, nor the output of a product differ in their loads.
    They get one size, and so one plan.

    Args:
        calls: The costs of each layer call on each process. The times are those of the first process.
    """

    def alike(call: CallCosts) -> object:
        return replace(call, other_bytes=0).sizes, call.kinds, call.window_tokens

    largest: dict[object, int] = {}
    for call in (call for of_process in calls for call in of_process):
        largest[alike(call)] = max(call.other_bytes, largest.get(alike(call), 0))
    return [replace(call, other_bytes=largest[alike(call)]) for call in calls[0]]


def largest_saved(saved: Sequence[Sequence[Sequence[SavedBytes]]]) -> list[list[SavedBytes]]:
    """Return the tensors that each layer call saves; those of each kind are of the process that saves most of it.

    Args:
        saved: The tensors that each layer call saves on each process.
    """
    return [_largest_of_call(of_processes) for of_processes in zip(*saved, strict=True)]


def _largest_of_call(saved: Sequence[Sequence[SavedBytes]]) -> list[SavedBytes]:
    kinds = dict.fromkeys(item.kind for items in saved for item in items)
    most = []
    for kind in kinds:
        ways = [[item for item in items if item.kind == kind] for items in saved]
        most += max(ways, key=lambda items: sum(item.size_bytes for item in items))
    return most
