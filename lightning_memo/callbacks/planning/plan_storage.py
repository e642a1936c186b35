"""From a profiled step to a plan that says kind by kind what is stored, the same for all processes."""

from __future__ import annotations

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.storage_budget import StorageBudget
from lightning_memo.artifacts.storage_plan import StoragePlan
from lightning_memo.artifacts.swap_plan import StoredBytes
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.layers.storage_slices import stored_bytes, stored_slices
from lightning_memo.parallel.rank_groups import Ranks
from lightning_memo.planner.alpha.plain_training import plain_plan
from lightning_memo.planner.storage.plan_storage_kinds import common_problem, plan_kinds, with_spare_device
from lightning_memo.planner.token_slices import TILE_TOKENS, TILED_FROM_TOKENS
from lightning_memo.profiler.measured_costs import measured_storage_costs


def plan_by_kind(
    profile: StepProfile,
    costs: LayerCosts,
    budget: Budget,
    label: Fingerprint,
    ranks: Ranks,
    everyone: bool,
    device_measured: bool,
) -> Plan:
    """Plain training if every process has room for it, else what the stronger linear program finds.

    Processes whose layers save the same bytes solve the same problem, that of the slowest with the least room, and so
    have the same plan; others have plans of their own.

    Args:
        profile: The step.
        costs: Of its layers.
        budget: What this process may use.
        label: What the plan is valid for.
        ranks: Who has to agree.
        everyone: All processes, or those that work on the same sequences.
        device_measured: Whether the budget's device memory is what was free, rather than what the user gave.

    Raises:
        ValueError: Some process finds no plan.
    """
    plain = plain_plan(costs, budget, label, "layer")
    if all(ranks.gather(plain is not None, everyone)) and plain is not None:
        return plain
    room = with_spare_device(budget, costs) if device_measured else budget
    own = measured_storage_costs(profile, costs), StorageBudget.of(room, costs)
    problem, limits = common_problem(ranks.gather(own, everyone)) or own
    tile = TILE_TOKENS if profile.tokens >= TILED_FROM_TOKENS else 1
    plan, error = None, None
    try:
        plan = plan_kinds(costs, problem, limits, label, tile_tokens=tile, stored_bytes=lambda p: _bytes_of(p, profile))
    except ValueError as refused:
        error = refused
    ranks.raise_together(error, everyone)
    assert plan is not None
    return plan


def _bytes_of(plan: StoragePlan, profile: StepProfile) -> StoredBytes:
    swapped, spilled, kept = [], [], []
    for number, call in enumerate(profile.in_order()):
        saved = [*call.saved, *(product.saved for product in call.products)]
        slices = stored_slices(plan, number, profile.tokens)
        swapped.append(stored_bytes(saved, profile.tokens, slices, "swap"))
        spilled.append(stored_bytes(saved, profile.tokens, slices, "spill"))
        kept.append(stored_bytes(saved, profile.tokens, slices, "keep"))
    slot = max(map(sum, zip(swapped, spilled, strict=True)))
    return StoredBytes(slot=slot, host=sum(swapped[:-2]), kept=sum(kept), spill=tuple(spilled))
