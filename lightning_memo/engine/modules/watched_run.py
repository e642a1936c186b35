"""Runs a layer as in training, and watches what it writes and keeps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.cut_tokens import cut
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.known_tensor import as_function_of
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.forward.refuse_checkpointing import refuse_inner_backward, refusing_transforms
from lightning_memo.engine.saved_tensors.hidden_writes import HiddenWrites
from lightning_memo.engine.saved_tensors.side_effects import SideEffects, kept_elsewhere
from lightning_memo.engine.state.layer_state import LayerState
from lightning_memo.engine.token_locality.user_code import without_global_hooks, without_hooks
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
    held = [(table, name, t, t.detach()) for table in tables for name, t in table.items() if isinstance(t, Tensor)]
    for table, name, _, alias in held:
        table[name] = alias
    try:
        with torch.enable_grad(), refusing_transforms(call.name), saved:
            yield
    finally:
        for table, name, t, alias in held:
            if table.get(name) is alias:
                table[name] = t


@contextlib.contextmanager
def watched_run(
    call: LayerCall,
    x: Tensor,
    effects: SideEffects,
    writes: HiddenWrites,
    attend: Callable[[Tensor, Tensor, Tensor, AttentionSpec], Tensor],
    note_own: Callable[[str], None],
) -> Iterator[Tensor]:
    """Yield a copy of the input with which the layer is to run inside the context.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        effects: Watches what the layer writes and keeps.
        writes: Watches what it writes into saved tensors.
        attend: Computes attention.
        note_own: Told why, if the layer computes an attention call itself.
    """
    note = effects.outside(writes.note)
    with effects.watching(), in_training(call, note):
        copy = x.clone()  # because a layer may change its input in place
        note(copy)  # another layer may have saved it
        everything = TokenRange(0, x.shape[call.token_dim], Action.KEEP)
        with handling(effects.outside(attend), call.layout, note_own), call.mode(everything), writes:
            yield copy


def refuse_effects(call: LayerCall, before: LayerState, effects: SideEffects, writes: HiddenWrites) -> None:
    """Refuse what a run has written or kept that cannot be undone.

    Raises:
        ValueError: It has written into saved tensors, or kept tensors elsewhere.
    """
    if writes.found:
        raise ValueError(
            f"{call.name} writes through .data into its input, or into a tensor that autograd has saved, and what is "
            "swapped are the values before that: write into a copy (t = t.clone())"
        )
    if any(t.requires_grad or effects.depends(t) for t in before.python.gained()):
        raise ValueError(kept_elsewhere(call.name))


def what_it_writes(call: LayerCall, x: Tensor, start: int, tokens: int) -> str:
    """Return the name of something that a layer writes into on some consecutive tokens; empty if there is nothing.

    The layer's state is restored.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        start: First token.
        tokens: Number of tokens.

    Raises:
        ValueError: It writes or keeps what cannot be undone.
    """
    part, x = on_some_tokens(call, x, start, tokens)
    with without_hooks(call.layer), without_global_hooks():
        before, writes = LayerState(part, x.device), HiddenWrites(part)
        given = [t for t in tree_leaves((part.args, part.kwargs)) if isinstance(t, Tensor) and t.requires_grad]
        effects = SideEffects([x, *given], before.why_not_written)

        def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
            """Stand in for attention, which writes nothing."""
            out = F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach(), enable_gqa=True)
            for t in (q, k, v, out):
                writes.note(t)
            return as_function_of(out, q, k, v, spec.sinks)

        try:
            with watched_run(part, x, effects, writes, attend, lambda why: None) as copy:
                part.run(copy, TokenRange(0, tokens, Action.KEEP))
            refuse_effects(part, before, effects, writes)
            changed = next(iter(before.buffers.changed()), "")
            return before.python.first_written() or before.tensors.changed() or changed
        finally:
            before.restore()


def on_some_tokens(call: LayerCall, x: Tensor, start: int, tokens: int) -> tuple[LayerCall, Tensor]:
    """Return a call of the same layer on some consecutive tokens, and its input without a graph."""
    arguments, stop = (call.args, call.kwargs), start + tokens
    args, kwargs = cut(arguments, call.tokens, start, stop, call.batch, call.token_dim, call.shards)
    part = replace(call, args=args, kwargs=kwargs, tokens=tokens).with_copied_containers()
    return part, x.detach().narrow(call.token_dim, start, tokens).requires_grad_(x.requires_grad)
