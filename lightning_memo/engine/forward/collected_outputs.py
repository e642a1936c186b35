"""What transformers' hooks collect inside the layers of a model, such as router logits.

Hooks append to lists, one entry per layer. Slices would append an entry each, so what they collect is joined.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.forward.layer_output import Collected, TokenPlace
from lightning_memo.planner.token_slices import TokenRange


def _collector() -> Any:
    """Return transformers' variable that holds the lists; `None` if it has not been imported."""
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)


def is_collected(name: str) -> bool:
    """Return whether the running model was asked for these outputs, for example "attentions"."""
    collector = _collector()
    return collector is not None and name in (collector.get() or ())


@contextlib.contextmanager
def _collecting_in(lists: Collected | None) -> Iterator[None]:
    collector = _collector()
    if collector is None:
        yield
        return
    token = collector.set(lists)
    try:
        yield
    finally:
        collector.reset(token)


def collecting_nothing() -> contextlib.AbstractContextManager[None]:
    """Inside this context, hooks do not collect outputs."""
    return _collecting_in(None)


@contextlib.contextmanager
def collecting_apart() -> Iterator[Collected]:
    """Inside this context, hooks collect outputs in lists of their own, which are returned."""
    collector = _collector()
    lists: Collected = {}
    if collector is None or not collector.get():
        yield lists
        return
    # The hidden states between layers are collected outside of them. Names with an underscore are no outputs.
    lists |= {name: [] for name in collector.get() if name != "hidden_states" and not name.startswith("_")}
    with _collecting_in(lists):
        yield lists


def collect_joined(parts: Sequence[Collected], slices: Sequence[TokenRange], call: LayerCall) -> None:
    """Collect what the slices of a layer have collected apart, as the whole layer would have done.

    Args:
        parts: What each slice has collected.
        slices: The tokens of each slice.
        call: The layer call.

    Raises:
        ValueError: An output does not hold the tokens of its slice.
    """
    for name in parts[0]:
        by_output = zip(*(part[name] for part in parts), strict=True)
        _collector().get()[name] += [_join(name, outputs, slices, call) for outputs in by_output]


def _join(name: str, outputs: Sequence[Any], slices: Sequence[TokenRange], call: LayerCall) -> Tensor:
    first, rows = call.token_dim, call.batch
    # Either dimensions of their own for sequences and tokens, or a common one. Routers get the tokens of all shards.
    for shards in (1, call.shards):
        flat = TokenPlace(0, rows * shards, 1) if first == 1 else TokenPlace(0, shards, rows)
        lengths = [shards * part.tokens for part in slices]
        for place, dims in ((TokenPlace(first, shards, 1), 2), (flat, 1)):
            if all(_sizes(t, dims) == _sizes_of(n, call, dims) for t, n in zip(outputs, lengths, strict=True)):
                return place.join(outputs)
    given = list(outputs[0].shape) if isinstance(outputs[0], Tensor) else type(outputs[0]).__name__
    raise ValueError(
        f"{call.name} was asked for {name}, which for {rows} rows of {slices[0].tokens} tokens are "
        f"{given}, and cannot be joined from slices: set output_{name}=False, or alpha=0 and no slice_tokens"
    )


def _sizes(t: Any, dims: int) -> tuple[int, ...] | None:
    return tuple(t.shape[:dims]) if isinstance(t, Tensor) else None


def _sizes_of(tokens: int, call: LayerCall, dims: int) -> tuple[int, ...]:
    if dims == 1:
        return (call.batch * tokens,)
    return (call.batch, tokens) if call.token_dim == 1 else (tokens, call.batch)
