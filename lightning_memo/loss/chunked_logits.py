"""Cross-entropy and other functions of logits that exist for one chunk of tokens at a time.

Note: [Gradients in the forward]
The cross-entropy computes the logits of a chunk once. Its forward computes the loss and the gradients from them, and
the backward only multiplies by the gradient of the loss. The head's matrix products are therefore those of plain
training. The gradients of the hidden states and of the head's parameters are kept until the backward, the latter in
fp32.

Note: [One chunk of logits]
Half-precision logits are copied to fp32, where softmax and gradient are computed in place; fp32 logits are overwritten.
The gradient is written back into the head's logits if the graph does not need them. The memory per logit of a chunk is
at most 4 bytes in fp32 and 6 bytes in half precision. The results of functions after the head are added: with a scale
it is 8 bytes in fp32, with a soft cap 16 bytes.

Note: [Logits are computed again]
The gradient of a value of a token, for example of its log-probability, is not known in the forward, so the backward
computes the logits of each chunk once more: the head's matrix product runs four times in place of three. Only the
values and the hidden states are kept.

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
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_memo.engine.memory.offloaded_tensor import OffloadedTensor, TensorBuilder
from lightning_memo.engine.memory.saved_storages import NotedTensor
from lightning_memo.engine.modules.token_local_modules import GradientSums, TokenLocal, chunks, noting_saved
from lightning_memo.parallel.local_tensors import awaited
from lightning_memo.utils.retained_graph import NOT_RETAINED, first_derivative, graph_is_retained

Pointwise = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class ChunkedLogits:
    """Computes logits from hidden states chunk by chunk.

    Attributes:
        head: The output head. It maps hidden states `[1, tokens, hidden]` to the logits of all sequence-parallel ranks'
            tokens, a tensor or a `DTensor` that is sharded in the vocabulary.
        pointwise: Functions that are applied to the logits after the head.
        chunk_tokens: Number of this process's tokens whose logits exist at the same time.
        shards: Number of sequence-parallel ranks, each with its own part of the tokens of every row.
    """

    head: TokenLocal
    pointwise: Sequence[Pointwise]
    chunk_tokens: int
    shards: int = 1

    def compute(self, x: Tensor) -> tuple[Tensor, _Columns, bool]:
        """Return the logits `[tokens, columns]` of a chunk, their columns, and whether they may be overwritten."""
        saved: set[int] = set()
        with noting_saved(saved):
            z = self.head(x)
            columns = _Columns.of(z)
            z = awaited(z.to_local() if isinstance(z, DTensor) else z)
            for function in self.pointwise:
                z = function(z)
            z = z.flatten(0, -2)
        return z, columns, z.untyped_storage().data_ptr() not in saved


@dataclass(frozen=True, slots=True)
class _Columns:
    """The part of the vocabulary whose logits this process has.

    Attributes:
        first: First token id.
        size: Number of token ids.
        group: Processes that share the vocabulary; `None` if this process has all of it.
    """

    first: int
    size: int
    group: dist.ProcessGroup | None

    @classmethod
    def of(cls, logits: Tensor) -> _Columns:
        if not isinstance(logits, DTensor) or not logits.placements[0].is_shard():
            return cls(0, logits.shape[-1], None)
        mesh, vocabulary = logits.device_mesh, logits.shape[-1]
        per_rank = -(-vocabulary // mesh.size())
        return cls(per_rank * mesh.get_local_rank(), logits.to_local().shape[-1], mesh.get_group())

    def combine(self, t: Tensor, operation: Any) -> Tensor:
        """Reduce `t` over the processes that share the vocabulary, in place."""
        if self.group is not None:
            dist.all_reduce(t, operation, self.group)
        return t


def chunked_cross_entropy(
    logits: ChunkedLogits, x: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean"
) -> Tensor:
    """Compute `torch.nn.functional.cross_entropy` of the logits of `x`.

    Args:
        logits: Computes the logits.
        x: Hidden states `[..., hidden]`; with several shards `[rows, tokens of this shard, hidden]`.
        target: Labels, int64 or uint8 `[all tokens]`, in the order of rows and tokens.
        ignore_index: Label of tokens that do not contribute to the loss.
        reduction: "mean" over the labels that are not ignored, or "sum".

    Returns:
        The loss, a scalar in fp32.
    """
    valid = target != ignore_index
    one = torch.ones((), dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    count = valid.sum() if reduction == "mean" else one
    weight = torch.where(valid, one / count, 0.0)  # finite even if no label is valid, when the loss is 0 / 0
    parts = _Parts(logits, _by_shard(target.masked_fill(~valid, 0).long(), x, logits), _by_shard(weight, x, logits))
    total: Tensor
    if torch.is_grad_enabled() and (x.requires_grad or logits.head.trained):
        total = _ChunkedCrossEntropy.apply(parts, awaited(x), *logits.head.trained)
    else:
        total, *_ = parts.run(awaited(x).detach())
    return torch.where(count > 0, total, torch.nan)


def _by_shard(values: Tensor, x: Tensor, logits: ChunkedLogits) -> Sequence[Tensor]:
    """Split the values of all tokens `[rows * tokens]` into chunks like `x`; a chunk has one shard after the other."""
    rows = x.shape[0] if logits.shards > 1 else 1
    of_shards = values.reshape(rows, logits.shards, -1).transpose(0, 1).reshape(logits.shards, -1)
    return [part.flatten() for part in of_shards.split(logits.chunk_tokens, 1)]


@dataclass(frozen=True, slots=True)
class _Parts:
    """The labels and the weights of the tokens' losses, by chunk."""

    logits: ChunkedLogits
    targets: Sequence[Tensor]
    weights: Sequence[Tensor]

    def run(self, x: Tensor, of_x: bool = False, of_head: bool = False) -> tuple[Tensor, Tensor | None, GradientSums]:
        """Return the loss, the gradient of `x` if `of_x`, and the gradients of the head's parameters if `of_head`."""
        dx, tokens = TensorBuilder.like(x) if of_x else None, self.logits.chunk_tokens
        losses, sums = [], GradientSums()
        for number, (part, target, weight) in enumerate(
            zip(chunks(x, tokens), self.targets, self.weights, strict=True)
        ):
            part = part.detach().requires_grad_(of_x)
            loss, part_dx, gradients = self._run_chunk(part, target, weight, of_x or of_head)
            losses.append(loss)
            sums.add(gradients)
            if dx is not None and part_dx is not None:
                dx.write_rows(number * tokens, part_dx)
        return torch.cat(losses).sum(), None if dx is None else dx.take(), sums

    def _run_chunk(
        self, x: Tensor, target: Tensor, weight: Tensor, needs_gradient: bool
    ) -> tuple[Tensor, Tensor | None, Sequence[Tensor | None]]:
        with torch.set_grad_enabled(needs_gradient):
            logits, columns, spare = self.logits.compute(x)
        # The logits are overwritten if the graph does not need them (`spare`). `data` hides this from autograd, which
        # refuses it for views. See Note: [One chunk of logits].
        work = logits.data.to(torch.promote_types(logits.dtype, torch.float32), copy=not spare)
        loss = _cross_entropy_(work, target, weight, columns, needs_gradient)
        if not needs_gradient:
            return loss, None, []
        gradient = work
        if work.dtype != logits.dtype:
            gradient = logits.data.copy_(work) if spare else work.to(logits.dtype)
        del work
        return loss, *self.logits.head.gradients(logits, x, gradient)


def _cross_entropy_(logits: Tensor, target: Tensor, weight: Tensor, columns: _Columns, gradient: bool) -> Tensor:
    """Return the weighted losses `[tokens]` of fp32 logits `[tokens, columns]`.

    The logits are overwritten, if `gradient` with the gradient of the sum of the losses. With the largest logit `m` of
    a token, `loss = weight * (log(sum(exp(z - m))) - (z_target - m))` and
    `gradient = weight * (softmax(z) - onehot(target))`.
    """
    largest = columns.combine(logits.amax(-1, keepdim=True), dist.ReduceOp.MAX)
    logits.sub_(largest)
    column, here = target - columns.first, torch.ones_like(weight)
    if columns.group is not None:
        here = ((column >= 0) & (column < columns.size)).to(weight.dtype)
        column = column.clamp(0, columns.size - 1)
    column = column[:, None]
    of_target = logits.gather(-1, column)[:, 0] * here
    total = logits.exp_().sum(-1)
    total, of_target = columns.combine(torch.stack([total, of_target]), dist.ReduceOp.SUM)
    if gradient:
        logits.mul_((weight / total)[:, None])
        logits.scatter_add_(-1, column, -(weight * here)[:, None].to(logits.dtype))
    return torch.where(weight == 0, 0.0, weight * (total.log() - of_target))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: _Parts, x: Tensor, *trained: Tensor) -> Tensor:
        loss, dx, sums = parts.run(x, of_x=ctx.needs_input_grad[1], of_head=bool(trained))
        ctx.dtypes, ctx.gradients = [p.dtype for p in trained], (dx, sums)
        return loss

    @staticmethod
    @first_derivative
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError(NOT_RETAINED)
        dx, sums = ctx.gradients
        if kept := graph_is_retained():
            sums = sums.copy()
        else:
            ctx.gradients = None
        return None, None if dx is None else _scaled(dx, upstream, kept), *sums.take(ctx.dtypes, upstream)


def _scaled(dx: Tensor, upstream: Tensor, kept: bool) -> Tensor:
    if isinstance(dx, OffloadedTensor):
        factor = upstream.clone()  # rows are computed when they are read
        return dx.mapped(lambda rows: rows * factor, dx.dtype)
    return dx * upstream if kept else dx.mul_(upstream)


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
        dx, sums, tokens = TensorBuilder.like(x) if of_x else None, GradientSums(), self.logits.chunk_tokens
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
