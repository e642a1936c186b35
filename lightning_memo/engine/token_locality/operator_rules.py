"""Rules that say, for operators of PyTorch, in which dims the result holds tokens.

A rule gets an :class:`Operation` of which at least one argument holds tokens. It returns the dims of the outputs, or
raises `TokensMixed`. Operators without a rule are taken apart by PyTorch's decompositions, or end the proof.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.token_locality import view_rules as views
from lightning_memo.engine.token_locality.operation import Operation
from lightning_memo.engine.token_locality.token_dims import Dims, once
from lightning_memo.utils.operator_values import tensors_in

Rule = Callable[[Operation], Dims | list[Dims]]


def elementwise(op: Operation) -> Dims:
    """Each entry of the result depends on entries at the same place."""
    result: Dims = ((),) * op.out.dim()
    for t in tensors_in(op.arguments, op.keywords):
        result = broadcast_to(op, result, op.dims_of(t))
    return result


def unchanged(op: Operation) -> Dims:
    """The result holds tokens where the first argument does."""
    return op.dims(0)


def reduction(op: Operation) -> list[Dims]:
    """Sums, means, norms and extrema over dimensions that hold no tokens."""
    dims = op.dims(0)
    given = op.argument(1, "dim", None)
    if given is None or isinstance(given, bool) or (not isinstance(given, int) and not len(given)):
        given = range(len(dims))
    reduced = {n % max(len(dims), 1) for n in ([given] if isinstance(given, int) else given)}
    for n in reduced if dims else ():
        op.check_plain(dims[n])
    kept = op.out.dim() == len(dims)
    result = tuple(() if n in reduced else dim for n, dim in enumerate(dims) if kept or n not in reduced)
    return [result] * len(op.outs)


def norm_reduction(op: Operation) -> list[Dims]:
    """`linalg_vector_norm`, whose dimensions come after the order of the norm."""
    return reduction(
        Operation(op.operator, (op.arguments[0], *op.arguments[2:]), op.keywords, op.result, op.dims_of, op.sizes)
    )


def along_last(op: Operation, place: int = 1) -> list[Dims]:
    """Softmax, cumulative sums, sorting: along a dimension that holds no tokens."""
    n = op.along(place, default=-1)
    return [op.resized(op.dims(0), n, out) for out in op.outs]


def move_along(op: Operation) -> Dims:
    """`flip` and `roll`: along dimensions that hold no tokens."""
    dims = op.dims(0)
    moved = op.argument(1 if op.name.endswith("flip") else 2, "dims", ())
    for n in ([moved] if isinstance(moved, int) else moved) or range(len(dims)):
        op.check_plain(dims[n])
    return dims


def matrix_product(op: Operation, first: int = 0) -> Dims:
    """Products of matrices, without a sum over tokens.

    Args:
        op: The operation.
        first: Place of the left matrix. Tensors before it are added, tensors after the right matrix are scales.
    """
    left, right = op.dims(first), op.dims(first + 1)
    op.check_plain(left[-1])
    op.check_plain(right[-2])
    batch = () if len(left) == 2 else (op.sizes.broadcast(left[0], right[0]),)
    product = once((*batch, left[-2], right[-1]), op.name)
    for n, other in enumerate(op.arguments):
        if isinstance(other, Tensor) and n not in (first, first + 1):
            product = broadcast_to(op, product, op.dims_of(other))
    return product


def broadcast_to(op: Operation, result: Dims, other: Dims) -> Dims:
    """Return the dims of `result` after an elementwise operation with a tensor of at most as many dimensions."""
    lead = len(result) - len(other)
    joined = [op.sizes.broadcast(dim, with_) for dim, with_ in zip(result[lead:], other, strict=True)]
    return once((*result[:lead], *joined), op.name)


def normalization(op: Operation) -> list[Dims]:
    """Layer and RMS norms: over the last dimensions, which hold no tokens. Further outputs are statistics."""
    dims, count = op.dims(0), len(op.argument(1, "normalized_shape"))
    for dim in dims[-count:]:
        op.check_plain(dim)
    return [dims, *[(*dims[:-count], *((),) * count)] * (len(op.outs) - 1)]


def filled(op: Operation) -> Dims:
    """`new_zeros` and the like: the same value everywhere."""
    return tuple(op.sizes.of_size(size) for size in op.out.shape)


def convolution(op: Operation) -> Dims:
    """A convolution whose tokens are in the batch dimension."""
    dims = op.dims(0)
    for dim in (*dims[1:], *op.dims(1)):
        op.check_plain(dim)
    return (dims[0], *map(op.sizes.without_tokens, op.out.shape[1:]))


def gather_or_scatter(op: Operation) -> Dims:
    """Collectives that join or divide the first dimension, which holds no tokens."""
    return op.resized(op.dims(0), 0)


def rule_of(operator: Any) -> Rule | None:
    """Return the rule for an operator; `None` if there is none."""
    rule = _RULES.get(operator.overloadpacket)
    return elementwise if rule is None and torch.Tag.pointwise in operator.tags else rule


_NAMES: Mapping[Rule, str] = {
    unchanged: "clone detach alias lift_fresh lift_fresh_copy _to_copy contiguous "
    "zero_ fill_ fill zeros_like ones_like empty_like full_like",
    elementwise: "copy_ copy masked_fill masked_fill_ where",
    views.view: "view _unsafe_view reshape _reshape_alias",
    views.permute: "permute",
    views.transpose: "transpose",
    views.reverse: "t numpy_T",
    views.unsqueeze: "unsqueeze",
    views.squeeze: "squeeze",
    views.expand: "expand repeat",
    views.select: "select",
    views.narrow: "slice",
    views.split: "split split_with_sizes",
    views.unbind: "unbind",
    views.concatenate: "cat",
    views.stack: "stack",
    views.pad: "constant_pad_nd",
    views.as_complex: "view_as_complex",
    views.as_real: "view_as_real",
    views.gather_entries: "gather",
    views.scatter_entries: "scatter scatter_ scatter_add scatter_add_",
    views.index: "index",
    views.look_up: "embedding",
    reduction: "sum mean amax amin any all var std var_mean std_mean logsumexp argmax argmin prod max min nansum",
    norm_reduction: "linalg_vector_norm",
    along_last: "_softmax _log_softmax cumsum cumprod sort cummax cummin logcumsumexp",
    functools.partial(along_last, place=2): "topk",
    move_along: "flip roll",
    matrix_product: "mm bmm _scaled_mm",
    functools.partial(matrix_product, first=1): "addmm baddbmm",
    normalization: "native_layer_norm _fused_rms_norm",
    filled: "new_zeros new_ones new_empty new_full",
    convolution: "convolution",
}
# The ranks of a collective compute the same tokens, or, with sequence parallelism, each the same slice of its shard.
_COLLECTIVES: Mapping[Rule, str] = {
    unchanged: "all_reduce wait_tensor",
    gather_or_scatter: "all_gather_into_tensor reduce_scatter_tensor",
}


def _by_operator(namespace: Any, names_of: Mapping[Rule, str]) -> dict[Any, Rule]:
    operators = {name: rule for rule, names in names_of.items() for name in names.split()}
    return {getattr(namespace, name): rule for name, rule in operators.items() if hasattr(namespace, name)}


_RULES = _by_operator(torch.ops.aten, _NAMES) | _by_operator(torch.ops._c10d_functional, _COLLECTIVES)
