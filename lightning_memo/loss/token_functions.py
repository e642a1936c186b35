"""Functions of all logits of a token, for example log-probabilities, whose values are computed in chunks of tokens.

Note: [Logits are computed again]
The gradient of a value is not known in the forward, so the backward computes the logits of each chunk once more: the
head's matrix product runs four times in place of three. Only the values and the hidden states are kept.

Note: [Readers]
A reader gets the number of dimensions of the logits `[..., vocabulary]` and the arguments of a call behind the logits.
It returns `None` for forms of the call that are no function of each token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_memo.engine.memory.lazy_tensor import Assembly
from lightning_memo.engine.memory.noted_tensors import NotedTensor
from lightning_memo.engine.modules.token_local_modules import GradientSums, chunks
from lightning_memo.loss.chunked_logits import ChunkedLogits
from lightning_memo.parallel.local_tensors import awaited
from lightning_memo.utils.retained_graph import first_derivative

# Maps logits `[tokens, vocabulary]` and further arguments `[tokens, ...]` to values `[tokens, ...]`.
OfTokens = Callable[..., Sequence[Tensor]]


def token_values(
    logits: ChunkedLogits, x: Tensor, values_of: OfTokens, arguments: Sequence[Tensor] = ()
) -> tuple[Tensor, ...]:
    """Compute values of each token from its logits.

    Args:
        logits: Computes the logits of all of the vocabulary.
        x: Hidden states `[..., hidden]`.
        values_of: Computes the values of some tokens.
        arguments: Further arguments `[all tokens, ...]`, which get no gradients.

    Returns:
        The values, each `[all tokens, ...]`.
    """
    work = _Work(logits, values_of, [t.split(logits.chunk_tokens) for t in arguments])
    if torch.is_grad_enabled() and (x.requires_grad or logits.head.trained):
        return tuple(_TokenValues.apply(work, awaited(x), *logits.head.trained))
    return work.forward(awaited(x))


def gradients_of_logits(
    logits: ChunkedLogits, x: Tensor, gradient: Tensor, of_x: bool
) -> tuple[Tensor | None, GradientSums]:
    """Return the gradient of `x` if `of_x`, and those of the head's parameters.

    Args:
        logits: Computes the logits of all of the vocabulary.
        x: Hidden states `[..., hidden]`.
        gradient: The gradient of the logits, `[..., vocabulary]`.
        of_x: Whether `x` needs a gradient.
    """
    return _Work(logits, lambda z: [z], []).backward(x, [gradient.flatten(0, -2)], of_x)


@dataclass(frozen=True, slots=True)
class _Work:
    """The functions and the arguments of each chunk."""

    logits: ChunkedLogits
    values_of: OfTokens
    arguments: Sequence[Sequence[Tensor]]

    def _parts(self, x: Tensor) -> Iterator[tuple[Tensor, list[Tensor]]]:
        for number, part in enumerate(chunks(x, self.logits.chunk_tokens)):
            yield part, [of_chunks[number] for of_chunks in self.arguments]

    def noted(self, x: Tensor) -> list[NotedTensor]:
        """Note what the backward reads again."""
        return [NotedTensor.of(t) for t in (x, *(of_chunks[0] for of_chunks in self.arguments))]

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the values."""
        found = [self.values_of(self.logits.compute(part)[0], *others) for part, others in self._parts(x)]
        return tuple(torch.cat(values) for values in zip(*found, strict=True))

    def backward(self, x: Tensor, gradients: Sequence[Tensor | None], of_x: bool) -> tuple[Tensor | None, GradientSums]:
        """Return the gradient of `x` if `of_x`, and those of the head's parameters.

        Args:
            x: The hidden states.
            gradients: The gradients of the values; `None` for values that have none.
            of_x: Whether `x` needs a gradient.
        """
        dx, sums, tokens = Assembly.like(x) if of_x else None, GradientSums(), self.logits.chunk_tokens
        for number, (part, others) in enumerate(self._parts(x)):
            rows = [None if t is None else t[number * tokens : (number + 1) * tokens] for t in gradients]
            with torch.enable_grad():
                part = part.detach().requires_grad_(of_x)
                logits, _, _ = self.logits.compute(part)
                leaf = logits.detach().requires_grad_()
                values = self.values_of(leaf, *others)
            pairs = [(value, row) for value, row in zip(values, rows, strict=True) if row is not None]
            of_values, of_rows = zip(*pairs, strict=True)
            (gradient,) = torch.autograd.grad(of_values, leaf, of_rows)
            del values, of_values, pairs
            part_dx, of_head = self.logits.head.gradients(logits, part, gradient)
            sums.add(of_head)
            if dx is not None and part_dx is not None:
                dx.write_rows(number * tokens, part_dx)
        return None if dx is None else dx.take(), sums


class _TokenValues(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, x: Tensor, *trained: Tensor) -> tuple[Tensor, ...]:
        values = work.forward(x)
        ctx.mark_non_differentiable(*(t for t in values if not t.is_floating_point()))
        ctx.set_materialize_grads(False)
        ctx.work, ctx.x, ctx.dtypes, ctx.noted = work, x, [p.dtype for p in trained], work.noted(x)
        return values

    @staticmethod
    @first_derivative
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if all(t is None for t in gradients):
            return None, None, *[None] * len(ctx.dtypes)
        for noted in ctx.noted:
            noted.check(
                "hidden states or token ids of which logits were taken were changed in place before their backward, "
                "which computes the logits again: clone() them first, or set loss_chunk_tokens=None"
            )
        dx, sums = ctx.work.backward(ctx.x, gradients, ctx.needs_input_grad[1])
        return None, dx, *sums.take(ctx.dtypes)


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
        return functools.partial(function, dim=-1, dtype=dtype) if _is_last(dim, dims) else None

    return None if function is None else _read(read, len(shape), args, kwargs)


def rows_of_parts(name: str, shape: Sequence[int], args: Sequence[Any], kwargs: dict[str, Any]) -> list[int] | None:
    """Read a call of `unbind` or of `split` along the first dimension: the rows of each part; `None` if it is none."""
    if len(shape) < 2 or name not in _PARTS:
        return None
    size = _read(_PARTS[name], len(shape), args, kwargs)
    return None if size is None else [min(size, shape[0] - first) for first in range(0, shape[0], size)]


def _first(values: Sequence[Tensor]) -> Tensor:
    return values[0]


def _logsumexp(dims: int, dim: Any, keepdim: bool = False) -> TokenFunction | None:
    if not _is_last(dim, dims):
        return None
    return TokenFunction(lambda z: [z.logsumexp(-1, keepdim)], (), _first)


def _sum(dims: int, dim: Any, keepdim: bool = False, dtype: torch.dtype | None = None) -> TokenFunction | None:
    if not _is_last(dim, dims):
        return None
    return TokenFunction(lambda z: [z.sum(-1, keepdim, dtype=dtype)], (), _first)


def _amax(dims: int, dim: Any, keepdim: bool = False) -> TokenFunction | None:
    if not _is_last(dim, dims):
        return None
    return TokenFunction(lambda z: [z.amax(-1, keepdim)], (), _first)


def _gather(dims: int, dim: Any, index: Tensor) -> TokenFunction | None:
    if not _is_last(dim, dims) or index.dim() != dims:
        return None
    return TokenFunction(lambda z, ids: [z.gather(-1, ids)], (index,), _first)


def _topk(dims: int, k: int, dim: Any = -1, largest: bool = True, sorted: bool = True) -> TokenFunction | None:
    if not _is_last(dim, dims):
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


def _is_last(dim: Any, dims: int) -> bool:
    """Return whether an argument names the last of some dimensions."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    return type(dim) is int and dim in (-1, dims - 1)
