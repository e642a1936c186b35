"""Where the tokens are in the shape of a tensor.

Note: [Token dims]
Each dimension of a tensor is a tuple of factors, whose product is its size: integers, and at most once `TOKENS`. After
`x.reshape(batch * tokens, hidden)`, the dims of `x` are `((batch, TOKENS), (hidden,))`. A tensor whose dims contain
`TOKENS` holds, for each token, values that depend on this token only. A tensor without depends on no token, on no
position and not on the number of tokens. What keeps neither promise has no dims, and the proof ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

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


def once(dims: Sequence[Dim], operation: object) -> Dims:
    """Return `dims`, which may hold the tokens in one dimension only.

    Raises:
        TokensMixed: A value of the tensor depends on two tokens.
    """
    if sum(TOKENS in dim for dim in dims) > 1:
        raise TokensMixed(f"{operation} relates tokens to each other")
    return tuple(dims)
