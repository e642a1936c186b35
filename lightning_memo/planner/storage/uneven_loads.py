"""Common sizes of layer calls on processes that share experts, and so have as many rows as the others send them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lightning_memo.artifacts.tensor_kind_costs import CallCosts
from lightning_memo.planner.token_slices import SavedBytes


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
    return [_with_others(call, largest[alike(call)]) for call in calls[0]]


def _with_others(call: CallCosts, other_bytes: int) -> CallCosts:
    moved = call.swapped_other_bytes
    if moved is not None:  # more rows of the same widths
        moved = -(-moved * other_bytes // max(call.other_bytes, 1))
    return replace(call, other_bytes=other_bytes, swapped_other_bytes=moved)


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
