"""How a plan cuts the input of a layer call."""

from __future__ import annotations

from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.engine.layers.token_sharing import SequenceCutter
from lightning_memo.planner.storage.storage_plan_slices import stored_slices
from lightning_memo.planner.token_slices import Action, TokenRange


def planned_slices(
    swap: SwapPlan, cutter: SequenceCutter, key: int, tokens: int, why_whole: str, why_nest: str
) -> tuple[TokenRange, ...]:
    """Return the slices of a layer call. A call that cannot be cut is swapped or recomputed as a whole.

    Args:
        swap: The plan.
        cutter: Cuts a sequence at an alpha.
        key: Number of the call among those that are alive.
        tokens: Number of tokens in its input.
        why_whole: Why the layer has to run as one slice; empty if it can be cut.
        why_nest: Why its attention cannot run slice after slice; empty if it can.
    """
    alpha = swap.alpha_of(key)
    stores_attention = swap.storage is None or swap.schedule == "nest"
    if swap.whole_layers or why_whole or (why_nest and not stores_attention):
        return (TokenRange(0, tokens, Action.SWAP if alpha >= 1.0 else Action.RECOMPUTE),)
    if swap.storage is not None:
        return stored_slices(swap.storage, key, tokens)
    return cutter.cut(tokens, alpha, swap.slice_tokens)
