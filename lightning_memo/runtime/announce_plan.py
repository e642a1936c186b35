"""Prints a new plan, and warns if it exceeds a budget."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_memo.artifacts.plan import Plan
from lightning_memo.config import MemoConfig
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.messages import show, tell
from lightning_memo.utils.units import format_bytes


def announce_plan(
    plan: Plan, config: MemoConfig, unsliceable: str, why_on_device: str, why_again: str | None = None
) -> None:
    """Show a plan, the first one as a table and later ones on a line, and warn of settings that it could not follow.

    Args:
        plan: The plan.
        config: The user's settings.
        unsliceable: Why layers cannot be cut into slices; empty if they can.
        why_on_device: Why keys and values stay on the device although slices were requested; empty if they do not.
        why_again: Why there is another plan, as the beginning of a sentence, or None if there was none before.
    """
    announce_whole_layers(plan, config, unsliceable)
    if why_on_device:
        rank_zero_warn(f"lightning_memo: keys and values stay on the device, because {why_on_device}.")
    for trial in plan.attention_trials:
        if trial.name == config.attention and trial.why_not:
            rank_zero_warn(f'lightning_memo: attention="{trial.name}" is left to PyTorch: {trial.why_not}.')
    if plan.swap.plain:
        tell(f"{why_again or ''}fits: trains as without lightning_memo. {plan.reason}")
    elif why_again is not None:
        tell(f"{why_again}{plan.line}")
    else:
        show(lambda: [plan.table])
    show(lambda: plan.details, logging.DEBUG)
    if plan.budget.disk_bytes and not plan.swap.disk_bytes:
        why = "the host has room for all swapped activations"
        if not plan.swap.storage.has_one_alpha:
            why = "spilling would not make a step shorter"
        tell(f"disk_path is not needed, because {why}.")


def announce_whole_layers(plan: Plan, config: MemoConfig, unsliceable: str) -> None:
    """Warn that layers run as one slice, if slices were asked for or would have been another plan.

    Args:
        plan: The plan.
        config: The user's settings.
        unsliceable: Why layers cannot be cut into slices; empty if they can.
    """
    swap = plan.swap
    as_given = config.alpha in (0.0, 1.0) and config.slice_tokens == "auto"  # layers run whole wherever they can
    if not unsliceable or swap.plain or as_given:
        return
    swapped = round(swap.alpha * swap.calls)
    some = f", and alpha={swap.alpha:.4g} swaps {swapped} of {swap.calls} layer calls" if 0.0 < swap.alpha < 1.0 else ""
    in_vain = "" if config.slice_tokens == "auto" else f"; slice_tokens={config.slice_tokens} saves no memory"
    rank_zero_warn(f"lightning_memo: layers run as one slice{some}, because {unsliceable}{in_vain}.")


def announce_locking(host_bytes: int, usable_bytes: int, batches: int) -> None:
    """Say how many batches run by another plan, because the host memory of the plan is not locked yet.

    Args:
        host_bytes: Host memory of the plan.
        usable_bytes: Host memory of the plan until then.
        batches: Number of batches.
    """
    tell(
        f"the next {f'{batches} batches are' if batches > 1 else 'batch is'} swapped to "
        f"{format_bytes(usable_bytes)} of host memory only, and slower, while {format_bytes(host_bytes)} are locked "
        "for copies in the background."
    )


def warn_of_no_plan(layers: Sequence[nn.Module]) -> None:
    """Warn that an optimizer step is over and no plan could be made.

    Args:
        layers: The layers of the engine, none of which got a gradient.
    """
    kinds = ", ".join(dict.fromkeys(class_name(layer) for layer in layers))
    rank_zero_warn(
        f"lightning_memo: nothing is swapped, because no backward went through the layers ({kinds}); if other layers "
        'are trained, name them: layers="encoder.blocks"'
    )


def warn_of_shortage(shortages: Sequence[str]) -> None:
    """Warn of the first process that has too little device memory for its plan.

    Args:
        shortages: The shortage of each process by rank; empty text for a process that has enough memory.
    """
    for rank, shortage in enumerate(shortages):
        if shortage:
            rank_zero_warn(f"lightning_memo: {f'rank {rank}: ' * (len(shortages) > 1)}{shortage}.")
            return
