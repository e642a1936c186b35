"""Sums over tokens in a backward pass.

The gradient of a weight is a sum over tokens, which may be computed slice by slice. It may be scaled, added to other
such sums and viewed, but anything else that is computed from it would differ for slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.token_locality.operation import Operation
from lightning_memo.engine.token_locality.token_dims import TOKENS, Dims, TokensMixed, holds_tokens

_aten = torch.ops.aten
_MOVING = (
    _aten.view, _aten._unsafe_view, _aten.reshape, _aten.t, _aten.transpose, _aten.permute, _aten.clone, _aten.detach,
    _aten._to_copy, _aten.alias, _aten.squeeze, _aten.unsqueeze, _aten.neg, _aten.sum,
)  # fmt: skip
_SCALING = (_aten.mul, _aten.div, _aten.mm, _aten.bmm)
_ADDING = (_aten.add, _aten.add_, _aten.sub)
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}


def sums_tokens(op: Operation) -> bool:
    """Return whether an operation adds up all tokens, and the result holds none."""
    packet = op.operator.overloadpacket
    if packet is _aten.sum:
        given = op.argument(1, "dim", None)
        summed = {n % len(op.dims(0)) for n in given} if given else range(len(op.dims(0)))
        return all(n in summed for n, dim in enumerate(op.dims(0)) if TOKENS in dim)
    if packet not in _PRODUCTS:
        return False
    first = _PRODUCTS[packet]
    left, right = op.dims(first), op.dims(first + 1)
    others = [t for n, t in enumerate(op.arguments) if isinstance(t, Tensor) and n not in (first, first + 1)]
    alone = not any(TOKENS in dim for dim in (*left[:-1], *right[:-2], right[-1]))
    return TOKENS in left[-1] and left[-1] == right[-2] and alone and not others


def dims_of_sum(op: Operation) -> Dims:
    """Return the dims of a result that holds no tokens.

    Raises:
        TokensMixed: Its size is a number of tokens.
    """
    if any(map(op.sizes.holds_tokens, op.out.shape)):
        raise TokensMixed(f"{op.name} makes a tensor by the number of tokens")
    return tuple(map(op.sizes.without_tokens, op.out.shape))


def stays_a_sum(func: Any, sums: Sequence[bool], dims: Sequence[Dims]) -> bool:
    """Return whether the result of an operation on sums is again the sum of what slices would compute.

    Args:
        func: The operator.
        sums: Whether each of its tensor arguments is a sum over tokens.
        dims: The dims of its tensor arguments.
    """
    packet = func.overloadpacket
    if any(map(holds_tokens, dims)):
        return False
    if packet in _MOVING:
        return True
    if packet in _ADDING:
        return len(sums) == 2 and all(sums)
    if packet in _SCALING:
        return sum(sums) == 1 and (sums[0] or packet is not _aten.div)
    return False
