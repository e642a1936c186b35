"""Where the tokens are in the shape of a tensor, and rules by which operators of PyTorch carry them to their results.

A rule gets an :class:`Operation` of which at least one argument holds tokens. It returns the dims of the outputs, or
raises `TokensMixed`. Operators without a rule are taken apart by PyTorch's decompositions, or end the proof.

Note: [Token dims]
Each dimension of a tensor is a tuple of factors, whose product is its size: integers, and at most once `TOKENS`. After
`x.reshape(batch * tokens, hidden)`, the dims of `x` are `((batch, TOKENS), (hidden,))`. A tensor whose dims contain
`TOKENS` holds, for each token, values that depend on this token only. A tensor without depends on no token, on no
position and not on the number of tokens. What keeps neither promise has no dims, and the proof ends.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from lightning_memo.utils.operator_values import tensors_in

TOKENS: Final = "tokens"

Factor = int | str
Dim = tuple[Factor, ...]
Dims = tuple[Dim, ...]


class TokensMixed(Exception):
    """An operation relates tokens to each other, or cannot be shown not to. The message says which."""


class TokenSizes:
    """Sizes of dims for one number of tokens.

    Args:
        tokens: Number of tokens: a prime that divides no other size of the layer.
    """

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def holds_tokens(self, size: int) -> bool:
        """Return whether a size is a multiple of the number of tokens."""
        return size > 0 and size % self.tokens == 0

    def without_tokens(self, size: int) -> Dim:
        """Return the dim of a size that is no number of tokens."""
        return () if size == 1 else (size,)

    def of_size(self, size: int) -> Dim:
        """Return the dim of a size in a tensor that holds the same value everywhere."""
        if not self.holds_tokens(size):
            return self.without_tokens(size)
        return (*self.without_tokens(size // self.tokens), TOKENS)

    def size(self, dim: Dim) -> int:
        """Return the size of a dim."""
        return math.prod(self.factor_size(factor) for factor in dim)

    def factor_size(self, factor: Factor) -> int:
        """Return the size of a factor of a dim."""
        return self.tokens if isinstance(factor, str) else factor

    def regroup(self, dims: Dims, shape: Sequence[int]) -> Dims:
        """Return the dims of a view that has another shape.

        Raises:
            TokensMixed: The view joins parts of different tokens.
        """
        left = _merged(factor for dim in dims for factor in dim)
        regrouped = tuple(_merged(self._take(left, size)) for size in shape)
        if left:
            raise TokensMixed("a view does not keep tokens apart")
        return tuple(tuple(dim) for dim in regrouped)

    def _take(self, left: list[Factor], size: int) -> Iterator[Factor]:
        """Take factors from the beginning whose product is `size`. Integers are split if necessary, tokens never."""
        while size > 1:
            factor = left.pop(0) if left else 1
            common = math.gcd(self.factor_size(factor), size)
            rest = self.factor_size(factor) // common
            if common == 1 or (factor == TOKENS and rest > 1):
                raise TokensMixed("a view does not keep tokens apart")
            yield factor if rest == 1 else common
            if rest > 1:
                left.insert(0, rest)
            size //= common

    def broadcast(self, first: Dim, second: Dim) -> Dim:
        """Return the dim of an elementwise result.

        Raises:
            TokensMixed: Tokens meet other tokens, or something that is not the same for all tokens.
        """
        if first == second or self.size(second) == 1:
            return first
        if self.size(first) == 1:
            return second
        if self._before_tokens(first) != self._before_tokens(second):
            raise TokensMixed("tokens meet other tokens")
        return first

    def _before_tokens(self, dim: Dim) -> int | None:
        """Return the size of the factors before the tokens; `None` if there are no tokens."""
        return self.size(dim[: dim.index(TOKENS)]) if TOKENS in dim else None


def _merged(factors: Iterable[Factor]) -> list[Factor]:
    """Return factors in which no integer follows another."""
    merged: list[Factor] = []
    for factor in factors:
        if merged and isinstance(factor, int) and isinstance(merged[-1], int):
            merged[-1] *= factor
        else:
            merged.append(factor)
    return merged


def holds_tokens(dims: Dims) -> bool:
    """Return whether a tensor holds values by token."""
    return any(TOKENS in dim for dim in dims)


def _once(dims: Sequence[Dim], operation: object) -> Dims:
    """Return `dims`, which may hold the tokens in one dimension only.

    Raises:
        TokensMixed: A value of the tensor depends on two tokens.
    """
    if sum(TOKENS in dim for dim in dims) > 1:
        raise TokensMixed(f"{operation} relates tokens to each other")
    return tuple(dims)


_MISSING = object()

_aten = torch.ops.aten
_MOVING = (
    _aten.view,
    _aten._unsafe_view,
    _aten.reshape,
    _aten.t,
    _aten.transpose,
    _aten.permute,
    _aten.clone,
    _aten.detach,
    _aten._to_copy,
    _aten.alias,
    _aten.squeeze,
    _aten.unsqueeze,
    _aten.neg,
    _aten.sum,
)
_SCALING = (_aten.mul, _aten.div, _aten.mm, _aten.bmm)
_ADDING = (_aten.add, _aten.add_, _aten.sub)
_PRODUCTS = {_aten.mm: 0, _aten.bmm: 0, _aten.addmm: 1, _aten.baddbmm: 1}


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of an operator of PyTorch, as rules see it.

    Attributes:
        operator: The operator.
        arguments: Its positional arguments.
        keywords: Its keyword arguments.
        result: What it returned.
        dims_of: Returns the dims of a tensor.
        sizes: Sizes of dims.
    """

    operator: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    result: Any
    dims_of: Callable[[Tensor], Dims]
    sizes: TokenSizes
    outs: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "outs", tensors_in(self.result))

    @property
    def name(self) -> str:
        """Name of the operator, for example "aten.cumsum"."""
        return str(self.operator.overloadpacket)

    @property
    def out(self) -> Tensor:
        """The first tensor that the operator returned."""
        return self.outs[0]

    def tensor(self, place: int) -> Tensor:
        """Return a positional argument that is a tensor."""
        t = self.arguments[place]
        assert isinstance(t, Tensor)
        return t

    def dims(self, place: int) -> Dims:
        """Return the dims of a positional argument."""
        return self.dims_of(self.tensor(place))

    def argument(self, place: int, name: str, default: Any = _MISSING) -> Any:
        """Return an argument that is given by position or by name."""
        value = self.arguments[place] if len(self.arguments) > place else self.keywords.get(name, default)
        assert value is not _MISSING, f"{self.name} without {name}"
        return value

    def along(self, place: int, default: Any = _MISSING) -> int:
        """Return the dimension, given at `place` or as `dim`, along which the operator computes.

        Raises:
            TokensMixed: This dimension holds tokens.
        """
        dims = self.dims(0)
        n = self.argument(place, "dim", default) % max(len(dims), 1)
        self.check_plain(dims[n] if dims else ())
        return int(n)

    def check_plain(self, dim: Dim) -> None:
        """Check that a dim holds no tokens.

        Raises:
            TokensMixed: It does.
        """
        if TOKENS in dim:
            raise TokensMixed(f"{self.name} computes along the tokens")

    def shortened(self, dims: Dims, n: int, start: int, out: Tensor | None = None) -> Dims:
        """Return `dims` for an output (by default the first) that is a part of dimension `n`, from `start` on.

        Raises:
            TokensMixed: The dimension holds tokens, and the part is not a number of whole copies of them.
        """
        size = (self.out if out is None else out).shape[n]
        if dims[n][1:] == (TOKENS,) and self.sizes.holds_tokens(size) and start % self.sizes.tokens == 0:
            return (*dims[:n], self.sizes.of_size(size), *dims[n + 1 :])
        return self.resized(dims, n, out)

    def resized(self, dims: Dims, n: int, out: Tensor | None = None) -> Dims:
        """Return `dims` with the size that dimension `n` has in an output (by default the first).

        Raises:
            TokensMixed: This dimension holds tokens, or the new size is a number of tokens.
        """
        self.check_plain(dims[n])
        size = (self.out if out is None else out).shape[n]
        if self.sizes.holds_tokens(size):
            raise TokensMixed(f"{self.name} makes a tensor by the number of tokens")
        return (*dims[:n], self.sizes.without_tokens(size), *dims[n + 1 :])


Rule = Callable[[Operation], Dims | list[Dims]]


def rule_of(operator: Any) -> Rule | None:
    """Return the rule for an operator; `None` if there is none."""
    rule = _RULES.get(operator.overloadpacket)
    return elementwise if rule is None and torch.Tag.pointwise in operator.tags else rule


def elementwise(op: Operation) -> Dims:
    """Each entry of the result depends on entries at the same place."""
    result: Dims = ((),) * op.out.dim()
    for t in tensors_in(op.arguments, op.keywords):
        result = broadcast_to(op, result, op.dims_of(t))
    return result


def unchanged(op: Operation) -> Dims:
    """The result holds tokens where the first argument does."""
    return op.dims(0)


def reduction(op: Operation, place: int = 1) -> list[Dims]:
    """Sums, means, norms and extrema over dimensions that hold no tokens."""
    dims = op.dims(0)
    given = op.argument(place, "dim", None)
    if given is None or isinstance(given, bool) or (not isinstance(given, int) and not len(given)):
        given = range(len(dims))
    reduced = {n % max(len(dims), 1) for n in ([given] if isinstance(given, int) else given)}
    for n in reduced if dims else ():
        op.check_plain(dims[n])
    kept = op.out.dim() == len(dims)
    result = tuple(() if n in reduced else dim for n, dim in enumerate(dims) if kept or n not in reduced)
    return [result] * len(op.outs)


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
    product = _once((*batch, left[-2], right[-1]), op.name)
    for n, other in enumerate(op.arguments):
        if isinstance(other, Tensor) and n not in (first, first + 1):
            product = broadcast_to(op, product, op.dims_of(other))
    return product


def broadcast_to(op: Operation, result: Dims, other: Dims) -> Dims:
    """Return the dims of `result` after an elementwise operation with a tensor of at most as many dimensions."""
    lead = len(result) - len(other)
    joined = [op.sizes.broadcast(dim, with_) for dim, with_ in zip(result[lead:], other, strict=True)]
    return _once((*result[:lead], *joined), op.name)


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


def view(op: Operation) -> Dims:
    """Views of another shape keep the entries of a token together."""
    return op.sizes.regroup(op.dims(0), op.out.shape)


def permute(op: Operation) -> Dims:
    """The dimensions in another order."""
    dims = op.dims(0)
    return tuple(dims[n] for n in op.argument(1, "dims"))


def transpose(op: Operation) -> Dims:
    """Two dimensions change places."""
    dims, (first, second) = list(op.dims(0)), (op.argument(1, "dim0"), op.argument(2, "dim1"))
    dims[first], dims[second] = dims[second], dims[first]
    return tuple(dims)


def reverse(op: Operation) -> Dims:
    """`t`: matrices and vectors."""
    return op.dims(0)[::-1]


def unsqueeze(op: Operation) -> Dims:
    """A new dimension of size 1."""
    dims = list(op.dims(0))
    dims.insert(op.argument(1, "dim") % (len(dims) + 1), ())
    return tuple(dims)


def squeeze(op: Operation) -> Dims:
    """Dimensions of size 1 are dropped."""
    shape, dims = op.tensor(0).shape, op.dims(0)
    given = op.argument(1, "dim", range(len(dims)))
    dropped = {n % len(dims) for n in ([given] if isinstance(given, int) else given)}
    return tuple(dim for n, dim in enumerate(dims) if not (n in dropped and shape[n] == 1))


def expand(op: Operation) -> Dims:
    """`expand` and `repeat`: new entries are copies."""
    return _once(_expanded(op), op.name)


def _expanded(op: Operation) -> Sequence[Dim]:
    """Return dims in which those of size 1 may have grown."""
    dims, lead = op.dims(0), op.out.dim() - op.tensor(0).dim()
    grown: list[Dim] = []
    for n, size in enumerate(op.out.shape):
        dim = dims[n - lead] if n >= lead else ()
        if op.sizes.size(dim) == size:
            grown.append(dim)
        elif op.name.endswith("repeat") and TOKENS in dim:  # one copy after another
            grown.append((size // op.sizes.size(dim), *dim))
        elif op.sizes.size(dim) == 1:
            grown.append(op.sizes.of_size(size))
        elif op.sizes.holds_tokens(size):
            raise TokensMixed(f"{op.name} repeats entries by the number of tokens")
        else:
            grown.append(op.sizes.without_tokens(size))
    return grown


def select(op: Operation) -> Dims:
    """One entry of a dimension that holds no tokens."""
    return _without(op.dims(0), op.along(1))


def narrow(op: Operation) -> Dims:
    """`slice`: the whole dimension, a part of one that holds no tokens, or one of several copies of the tokens."""
    dims, n = op.dims(0), op.argument(1, "dim", 0) % op.tensor(0).dim()
    if op.argument(4, "step", 1) != 1:
        op.check_plain(dims[n])
    elif op.out.shape == op.tensor(0).shape:
        return dims
    return op.shortened(dims, n, op.argument(2, "start", None) or 0)


def split(op: Operation) -> list[Dims]:
    """Parts of a dimension that holds no tokens, or several copies of the tokens."""
    dims, parts, start = op.dims(0), [], 0
    n = op.argument(2, "dim", 0) % len(dims)
    for part in op.outs:
        parts.append(op.shortened(dims, n, start, part))
        start += part.shape[n]
    return parts


def unbind(op: Operation) -> list[Dims]:
    """All entries of a dimension that holds no tokens."""
    return [_without(op.dims(0), op.along(1, default=0))] * len(op.outs)


def _without(dims: Dims, n: int) -> Dims:
    return dims[:n] + dims[n + 1 :]


def concatenate(op: Operation) -> Dims:
    """Tensors that hold tokens alike, joined along a dimension that holds none, or all tokens in each part."""
    parts = [t for t in op.argument(0, "tensors") if t.dim() == op.out.dim()]
    n = op.argument(1, "dim", 0) % op.out.dim()
    joined = {op.dims_of(t)[n] for t in parts}
    if joined == {(TOKENS,)}:
        dims = _same_but(op, parts, None)
        return (*dims[:n], (*op.sizes.without_tokens(len(parts)), TOKENS), *dims[n + 1 :])
    return op.resized(_same_but(op, parts, n), n)


def stack(op: Operation) -> Dims:
    """Tensors that hold tokens alike, joined along a new dimension."""
    parts = op.argument(0, "tensors")
    dims, n = _same_but(op, parts, None), op.argument(1, "dim", 0) % op.out.dim()
    return (*dims[:n], op.sizes.without_tokens(len(parts)), *dims[n:])


def _same_but(op: Operation, tensors: Sequence[Tensor], other: int | None) -> Dims:
    """Return the dims of tensors that hold tokens alike in all dimensions except `other`.

    Raises:
        TokensMixed: They do not, or hold tokens in `other`.
    """
    found = [list(op.dims_of(t)) for t in tensors]
    result = found[0]
    for dims in found:
        for n, dim in enumerate(dims):
            if n == other:
                op.check_plain(dim)
            elif dim != result[n] and (TOKENS in dim or TOKENS in result[n]):
                raise TokensMixed(f"{op.name} joins tensors that hold tokens in different places")
    return tuple(result)


def pad(op: Operation) -> Dims:
    """Entries are added to dimensions that hold no tokens."""
    dims, amounts = op.dims(0), op.argument(1, "pad")
    for n in range(len(amounts) // 2):
        if amounts[2 * n] or amounts[2 * n + 1]:
            dims = op.resized(dims, len(dims) - 1 - n)
    return dims


def as_complex(op: Operation) -> Dims:
    """Pairs of the last dimension become complex numbers."""
    op.check_plain(op.dims(0)[-1])
    return op.dims(0)[:-1]


def as_real(op: Operation) -> Dims:
    """Complex numbers become pairs in a new last dimension."""
    return (*op.dims(0), (2,))


def gather_entries(op: Operation) -> Dims:
    """`gather`: from a tensor, along a dimension without tokens, for an index of the same tokens."""
    if not holds_tokens(op.dims(0)):  # a table
        return op.dims(2)
    _same_but(op, [op.tensor(0), op.tensor(2)], op.along(1))
    return op.dims(2)


def scatter_entries(op: Operation) -> Dims:
    """`scatter` and `scatter_add`, along a dimension without tokens."""
    values = [value for value in op.arguments[3:] if isinstance(value, Tensor)]
    _same_but(op, [op.tensor(0), op.tensor(2), *values], op.along(1))
    return op.dims(0)


def index(op: Operation) -> Dims:
    """Indexing with one tensor of indices, along a dimension without tokens."""
    dims = op.dims(0)
    given = [(n, t) for n, t in enumerate(op.argument(1, "indices")) if t is not None]
    if len(given) != 1:
        raise TokensMixed(f"{op.name} with several tensors of indices")
    n, indices = given[0]
    op.check_plain(dims[n])
    return _once((*dims[:n], *op.dims_of(indices), *dims[n + 1 :]), op.name)


def look_up(op: Operation) -> Dims:
    """`embedding`: rows of a table that no token has made."""
    table, indices = op.dims(0), op.dims(1)
    for dim in table:
        op.check_plain(dim)
    return (*indices, *table[1:])


_NAMES: Mapping[Rule, str] = {
    unchanged: "clone detach alias lift_fresh lift_fresh_copy _to_copy contiguous "
    "zero_ fill_ fill zeros_like ones_like empty_like full_like",
    elementwise: "copy_ copy masked_fill masked_fill_ where",
    view: "view _unsafe_view reshape _reshape_alias",
    permute: "permute",
    transpose: "transpose",
    reverse: "t numpy_T",
    unsqueeze: "unsqueeze",
    squeeze: "squeeze",
    expand: "expand repeat",
    select: "select",
    narrow: "slice",
    split: "split split_with_sizes",
    unbind: "unbind",
    concatenate: "cat",
    stack: "stack",
    pad: "constant_pad_nd",
    as_complex: "view_as_complex",
    as_real: "view_as_real",
    gather_entries: "gather",
    scatter_entries: "scatter scatter_ scatter_add scatter_add_",
    index: "index",
    look_up: "embedding",
    reduction: "sum mean amax amin any all var std var_mean std_mean logsumexp argmax argmin prod max min nansum",
    functools.partial(reduction, place=2): "linalg_vector_norm",  # the order of the norm comes before
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


def sums_tokens(op: Operation) -> bool:
    """Return whether an operation of a backward pass adds up all tokens, and the result holds none.

    The gradient of a weight is a sum over tokens, which may be computed slice by slice. It may be scaled, added to
    other such sums and viewed, but anything else that is computed from it would differ for slices.
    """
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
