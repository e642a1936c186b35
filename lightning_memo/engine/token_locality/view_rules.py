"""Rules for operations that move, repeat or select entries of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_memo.engine.token_locality.operation import Operation
from lightning_memo.engine.token_locality.token_dims import TOKENS, Dim, Dims, TokensMixed, holds_tokens, once


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
    return once(_expanded(op), op.name)


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
    return once((*dims[:n], *op.dims_of(indices), *dims[n + 1 :]), op.name)


def look_up(op: Operation) -> Dims:
    """`embedding`: rows of a table that no token has made."""
    table, indices = op.dims(0), op.dims(1)
    for dim in table:
        op.check_plain(dim)
    return (*indices, *table[1:])


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


def _without(dims: Dims, n: int) -> Dims:
    return dims[:n] + dims[n + 1 :]
