"""What a layer returns: its hidden states, and side values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_unflatten

from lightning_memo.utils.class_names import class_name


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


# Outputs that hooks of transformers have collected inside a layer, by name.
Collected: TypeAlias = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class SideValues:
    """What a layer returns beside its hidden states.

    Attributes:
        values: Tensors and other values, in the order in which the return value holds them.
        build: Returns the return value for given hidden states and side values.
        collected: Outputs that were collected inside the layer, if they are apart from those of the model.
    """

    values: tuple[Any, ...]
    build: Callable[[Tensor, Sequence[Any]], Any]
    collected: Collected = field(default_factory=dict)


def split_output(output: Any, x: Tensor, layer: nn.Module) -> tuple[Tensor, SideValues]:
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
        return output, SideValues((), lambda hidden, _: hidden)
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

    return leaves[place], SideValues(tuple(leaves[:place] + leaves[place + 1 :]), build)


def fields_of(output: Any) -> Any:
    """Return the fields by name of a dataclass that PyTorch takes for a leaf, and other values as they are."""
    if is_unknown_dataclass(output):
        return {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    return output


def is_unknown_dataclass(output: Any) -> bool:
    """Return whether PyTorch takes a dataclass for a leaf."""
    return dataclasses.is_dataclass(output) and tree_is_leaf(output)
