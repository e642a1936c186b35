"""Plans with a single alpha, their slices and their memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from lightning_memo.artifacts.costs import Place, resident_calls
from lightning_memo.artifacts.swap_plan import PlanMemory, StoragePlan, SwapPlan
from lightning_memo.planner.token_slices import (
    TokenRange,
    memory_of_slots,
    plan_of_alpha,
    slices_of,
    spread,
)

SWAPPED: Final[tuple[tuple[str, Place], ...]] = tuple(
    (kind, "host") for kind in ("input", "attention", "other", "state")
)
"""Places of a slice that a single alpha swaps."""


def slices_at(tokens: int, alpha: float, longest: int | None = None, multiple: int = 1) -> tuple[TokenRange, ...]:
    """Return MEMO's slices of a sequence, each of at most `longest` tokens."""
    return slices_of(plan_of_alpha(tokens, alpha, slice_tokens=longest, multiple=multiple), 0, tokens, multiple)


def memory_by(slot_bytes: Callable[[float], int], leaving: int) -> Callable[[StoragePlan], PlanMemory]:
    """Return a function for the memory of plans, given the slot of a layer call for a fraction of the tokens."""
    return partial(memory_of_slots, slot_bytes=slot_bytes, leaving=leaving)


def alpha_swap(
    alpha: float,
    calls: int,
    slot_bytes: int,
    tokens: int = 1000,
    *,
    slice_tokens: int | None = None,
    disk_calls: int = 0,
    joint_attention: bool = False,
    **settings: Any,
) -> SwapPlan:
    """Return a plan with slots of the same size, some of which go to the disk."""
    leaving = calls - resident_calls(calls, settings.get("in_flight"))
    storage = plan_of_alpha(tokens, alpha, calls, slice_tokens=slice_tokens, spilled=spread(disk_calls, leaving))
    memory = memory_of_slots(storage, lambda _: slot_bytes, leaving)
    return SwapPlan(storage=storage, memory=memory, joint_attention=joint_attention, **settings)
