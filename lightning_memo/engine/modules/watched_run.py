"""Runs a layer as in training, and watches what it writes and keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.forward.refuse_checkpointing import refuse_inner_backward, refusing_transforms
from lightning_memo.engine.recurrence.intercept_states import StateHandler, handing
from lightning_memo.engine.saved_tensors.hidden_writes import HiddenWrites
from lightning_memo.engine.saved_tensors.side_effects import SideEffects, kept_elsewhere
from lightning_memo.engine.state.layer_state import LayerState
from lightning_memo.kernels import AttentionSpec
from lightning_memo.planner.token_slices import Action, TokenRange


@contextlib.contextmanager
def in_training(call: LayerCall, on_saved: Callable[[Tensor], None] = lambda t: None) -> Iterator[None]:
    """Let a layer find gradients enabled, as layers may ask for that, without keeping what autograd saves.

    Args:
        call: The layer and its arguments.
        on_saved: Called with each tensor that autograd saves.
    """
    saved = saved_tensors_hooks(on_saved, lambda _: refuse_inner_backward(call.name))
    # What a layer adds to in place must not become a function of a probe.
    tables = [table for module in call.layer.modules() for table in (module._buffers, vars(module))]
    held = [(table, name, t, t.detach()) for table in tables for name, t in table.items() if _is_tensor(t)]
    for table, name, _, alias in held:
        table[name] = alias
    try:
        with torch.enable_grad(), refusing_transforms(call.name), saved:
            yield
    finally:
        for table, name, t, alias in held:
            if table.get(name) is alias:
                table[name] = t


def _is_tensor(value: object) -> bool:
    """Return whether a value is a tensor. Proxies are not asked for their classes."""
    return issubclass(type(value), Tensor)


@contextlib.contextmanager
def watched_run(
    call: LayerCall,
    x: Tensor,
    effects: SideEffects,
    writes: HiddenWrites,
    attend: Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor],
    note_own: Callable[[str], None],
    hand: StateHandler,
) -> Iterator[Tensor]:
    """Yield a copy of the input with which the layer is to run inside the context.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        effects: Watches what the layer writes and keeps.
        writes: Watches what it writes into saved tensors.
        attend: Computes attention.
        note_own: Told why, if the layer computes an attention call or a recurrence itself.
        hand: Computes recurrences.
    """
    note = effects.outside(writes.note)
    with effects.watching(), in_training(call, note):
        copy = x.clone()  # because a layer may change its input in place
        note(copy)  # another layer may have saved it
        everything = TokenRange(0, x.shape[call.token_dim], Action.KEEP)
        attention = handling(effects.outside(attend), call.layer, call.layout, note_own)
        with attention, handing(call.layer, hand, note_own), call.mode(everything), writes:
            yield copy


def refuse_effects(call: LayerCall, before: LayerState, effects: SideEffects, writes: HiddenWrites) -> None:
    """Refuse what a run has written or kept that cannot be undone.

    Raises:
        ValueError: It has written into saved tensors, or kept tensors elsewhere.
    """
    writes.refuse()
    if any(t.requires_grad or effects.depends(t) for t in before.python.gained()):
        raise ValueError(kept_elsewhere(call.name))
