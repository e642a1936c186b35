"""Functions of all logits of a token, as they are called on logits `[..., vocabulary]`.

A reader gets the number of dimensions of the logits and the arguments of a call behind them. It returns `None` for
forms of the call that are no function of each token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memo.loss.token_values import OfTokens


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


_NORMALISING: dict[str, Callable[..., Tensor]] = {"softmax": torch.softmax, "log_softmax": torch.log_softmax}
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
    found = None if name not in _READERS else _read(_READERS[name], len(shape), args, kwargs)
    if found is not None and any(t.shape[: len(shape) - 1] != tuple(shape[:-1]) for t in found.arguments):
        return None
    return found


def normalising(
    name: str, shape: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[[Tensor], Tensor] | None:
    """Read a call of `softmax` or `log_softmax` over the vocabulary; `None` if it is none. Arguments as above."""
    function = _NORMALISING.get(name)

    def read(dims: int, dim: Any, *, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> Any:
        return functools.partial(function, dim=-1, dtype=dtype) if is_last(dim, dims) else None

    return None if function is None else _read(read, len(shape), args, kwargs)


def rows_of_parts(name: str, shape: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]) -> list[int] | None:
    """Read a call of `unbind` or of `split` along the first dimension: the rows of each part; `None` if it is none."""
    if len(shape) < 2 or name not in _PARTS:
        return None
    size = _read(_PARTS[name], len(shape), args, kwargs)
    return None if size is None else [min(size, shape[0] - first) for first in range(0, shape[0], size)]


def _unbind(dims: int, dim: int = 0) -> int | None:
    return 1 if dim in (0, -dims) else None


def _split(dims: int, split_size: Any, dim: int = 0) -> int | None:
    return split_size if dim in (0, -dims) and type(split_size) is int and split_size > 0 else None


_PARTS: dict[str, Callable[..., int | None]] = {"unbind": _unbind, "split": _split}


def _read(reader: Callable[..., Any], dims: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    try:
        call = inspect.signature(reader).bind(dims, *args, **kwargs)
    except TypeError:  # another form of the call, for example a sum of everything
        return None
    return reader(*call.args, **call.kwargs)


def is_last(dim: Any, dims: int) -> bool:
    """Return whether an argument names the last of some dimensions."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return type(dim) is int and dim in (-1, dims - 1)
