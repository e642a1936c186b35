"""Outputs of a layer besides hidden states: those that it returns, and those that transformers' hooks collect.

Hooks append to lists, one entry per layer. Slices would append an entry each, so what they collect is joined.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_unflatten

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.planner.token_slices import TokenRange
from lightning_memo.utils.class_names import class_name

# Outputs that hooks of transformers have collected inside a layer, by name.
Collected: TypeAlias = dict[str, list[Any]]


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


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """Where a side value holds the tokens: in dimension `dim`, whose size is `before * tokens * after`."""

    dim: int
    before: int
    after: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join the side values of consecutive slices in the order of the tokens."""
        unflattened = [t.unflatten(self.dim, (self.before, -1, self.after)) for t in parts]
        return torch.cat(unflattened, self.dim + 1).flatten(self.dim, self.dim + 2)


@dataclass(frozen=True, slots=True)
class ExtraOutputs:
    """What a layer returns beside its hidden states.

    Attributes:
        values: Tensors and other values, in the order in which the return value holds them.
        build: Returns the return value for given hidden states and side values.
        collected: Outputs that were collected inside the layer, if they are apart from those of the model.
    """

    values: tuple[Any, ...]
    build: Callable[[Tensor, Sequence[Any]], Any]
    collected: Collected = field(default_factory=dict)


def split_output(output: Any, x: Tensor, layer: nn.Module) -> tuple[Tensor, ExtraOutputs]:
    """Take a return value apart: a tensor, or a tree of tuples, lists, dicts and dataclasses.

    Args:
        output: The return value.
        x: The layer's input.
        layer: The layer.

    Returns:
        The hidden states, which are the first tensor of the shape of `x`, and the side values.

    Raises:
        ValueError: It holds no such tensor.
    """
    if isinstance(output, Tensor) and output.shape == x.shape:
        return output, ExtraOutputs((), lambda hidden, _: hidden)
    leaves, spec = tree_flatten(fields_of(output))
    tensors = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    place = next((n for n in tensors if leaves[n].shape == x.shape), None)
    if place is None:
        shapes = ", ".join(str(list(leaves[n].shape)) for n in tensors)
        raise ValueError(
            f"{class_name(layer)} returned {type(output).__name__} with {shapes or 'no tensor'} for an input of "
            f"shape {list(x.shape)}, but a layer has to return hidden states of the same shape: name other layers, "
            'as in layers="encoder.blocks", or train this model without lightning_memo'
        )
    unknown = output if is_unknown_dataclass(output) else None

    def build(hidden: Tensor, values: Sequence[Any]) -> Any:
        built = tree_unflatten([*values[:place], hidden, *values[place:]], spec)
        return built if unknown is None else dataclasses.replace(unknown, **built)

    return leaves[place], ExtraOutputs(tuple(leaves[:place] + leaves[place + 1 :]), build)


def fields_of(output: Any) -> Any:
    """Return the fields by name of a dataclass that PyTorch takes for a leaf, and other values as they are."""
    if is_unknown_dataclass(output):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return output


def is_unknown_dataclass(output: Any) -> bool:
    """Return whether PyTorch takes a dataclass for a leaf."""
    return dataclasses.is_dataclass(output) and tree_is_leaf(output)
