"""Functions of all logits of a token, as they are called on logits `[..., vocabulary]`.

Each entry of `OF_TOKENS` reads the arguments of a call behind the logits. It returns a function of the logits of some
tokens, `[tokens, vocabulary]`, and further arguments of each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memo.loss.token_values import OfTokens

NORMALISING = ("log_softmax", "softmax")


class TokenFunction(NamedTuple):
    """A function of all logits of a token.

    Attributes:
        values_of: Computes its values for some tokens.
        arguments: Further arguments, `[*leading, ...]`.
        wrap: Makes the result of the call from the values.
    """

    values_of: OfTokens
    arguments: Sequence[Tensor]
    wrap: Callable[[Sequence[Tensor]], Any]


def _first(values: Sequence[Tensor]) -> Tensor:
    return values[0]


def _logsumexp(dims: int, dim: Any, keepdim: bool = False) -> TokenFunction | None:
    if not is_last(dim, dims):
        return None
    return TokenFunction(lambda z: [z.logsumexp(-1, keepdim)], (), _first)


def _sum(dims: int, dim: Any, keepdim: bool = False, dtype: torch.dtype | None = None) -> TokenFunction | None:
    if not is_last(dim, dims):
        return None
    return TokenFunction(lambda z: [z.sum(-1, keepdim, dtype=dtype)], (), _first)


def _amax(dims: int, dim: Any, keepdim: bool = False) -> TokenFunction | None:
    if not is_last(dim, dims):
        return None
    return TokenFunction(lambda z: [z.amax(-1, keepdim)], (), _first)


def _gather(dims: int, dim: Any, index: Tensor) -> TokenFunction | None:
    if not is_last(dim, dims) or index.dim() != dims:
        return None
    return TokenFunction(lambda z, ids: [z.gather(-1, ids)], (index,), _first)


def _topk(dims: int, k: int, dim: Any = -1, largest: bool = True, sorted: bool = True) -> TokenFunction | None:
    if not is_last(dim, dims):
        return None
    return TokenFunction(lambda z: z.topk(k, -1, largest, sorted), (), torch.return_types.topk)


_READERS: dict[str, Callable[..., TokenFunction | None]] = {
    "logsumexp": _logsumexp,
    "sum": _sum,
    "amax": _amax,
    "gather": _gather,
    "topk": _topk,
}


def token_function(
    name: str, shape: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
) -> TokenFunction | None:
    """Read a call of a function on logits; `None` if it is none of each token's logits.

    Args:
        name: Name of the function.
        shape: Shape of the logits.
        args: Positional arguments behind the logits.
        kwargs: Keyword arguments.
    """
    reader = _READERS.get(name)
    if reader is None:
        return None
    try:
        call = inspect.signature(reader).bind(len(shape), *args, **kwargs)
    except TypeError:  # another form of the call, for example a sum of everything
        return None
    found = reader(*call.args, **call.kwargs)
    if found is not None and any(t.shape[: len(shape) - 1] != tuple(shape[:-1]) for t in found.arguments):
        return None
    return found


def is_last(dim: Any, dims: int) -> bool:
    """Return whether an argument names the last of some dimensions."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return type(dim) is int and dim in (-1, dims - 1)
