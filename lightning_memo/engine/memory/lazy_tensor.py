"""Tensors of one row per token that exist a few rows at a time: they are on the host, or computed when they are read.

Hidden states between layers are such tensors where everything of the sequence's size lives on the host. Whoever knows
them (layers, the last norm, the loss) reads and writes them slice by slice; everything else gets a real tensor,
computed once: correct, but as large as without this.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from typing_extensions import Self, override

from lightning_memo.engine.memory.row_matrices import (
    Arrival,
    DeviceRows,
    HostRows,
    MappedRows,
    RowFunction,
    Rows,
    part_rows,
)
from lightning_memo.engine.memory.slot_memory import SlotMemory

aten = torch.ops.aten
_ALIASES = (aten.detach.default, aten.alias.default)
_CAST_ARGUMENTS = {"dtype"}


class _Source:
    """Where the rows of a tensor and of its aliases are."""

    def __init__(self, rows: Rows, real: Tensor | None = None) -> None:
        self.rows, self.real = rows, real


class LazyTensor(Tensor):
    """A tensor `[..., features]` whose rows come to the device when they are read; see the head of this file.

    Args:
        source: Where its rows are.
        shape: Its shape.
        dtype: Its type.
        device: Where its rows come to.
        at_once: Rows that may be on the device at once.
        memory: Gives room for tensors that are computed from it, slice by slice; `None`: not known yet.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, source: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *_: Any) -> Self:
        return Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)

    def __init__(
        self,
        source: Rows | _Source,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        at_once: int,
        memory: SlotMemory | None = None,
    ) -> None:
        self._source = source if isinstance(source, _Source) else _Source(source)
        self.at_once, self.memory = at_once, memory

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyTensor(shape={list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def fetch(self, ranges: Sequence[range]) -> Arrival:
        """Start bringing some rows to the device; rows are counted over all dimensions but the last."""
        return self._source.rows.fetch(ranges)

    def fetch_part(self, dim: int, start: int, stop: int) -> Arrival:
        """Start bringing `self.narrow(dim, start, stop - start)` to the device; `dim` is not the last one."""
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        arrival = self.fetch(part_rows(self.shape, dim, start, stop))
        return lambda: arrival().view(shape)

    def mapped(self, function: RowFunction, dtype: torch.dtype) -> LazyTensor:
        """A function of each row, of the same shape; without history."""
        return LazyTensor(
            MappedRows(self._source.rows, function), self.shape, dtype, self.device, self.at_once, self.memory
        )

    def materialize(self) -> Tensor:
        """The real tensor: computed once, and what everything goes to from then on."""
        source = self._source
        if source.real is None:
            matrix = source.rows.fetch([range(self.shape[:-1].numel())])()
            source.real, source.rows = matrix.view(self.shape), DeviceRows(matrix)
        return source.real

    def _alias(self) -> LazyTensor:
        return LazyTensor(self._source, self.shape, self.dtype, self.device, self.at_once, self.memory)

    @classmethod
    @override
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyTensor):
            if func in _ALIASES or (func is aten.view.default and _is_shape_of(first, args[1])):
                return first._alias()
            given = {name for name, value in kwargs.items() if value is not None}
            if func is aten._to_copy.default and given == _CAST_ARGUMENTS:
                dtype = kwargs["dtype"]
                return first.mapped(lambda rows: rows.to(dtype), dtype)
            if func is aten.slice.Tensor and (part := _sliced(first, *args[1:])) is not None:
                return part
        args, kwargs = tree_map_only(LazyTensor, LazyTensor.materialize, (args, kwargs))
        result = func(*args, **kwargs)
        return first if isinstance(first, LazyTensor) and result is args[0] else result  # changed in place


def _is_shape_of(t: Tensor, wished: Sequence[int]) -> bool:
    return len(wished) == t.dim() and all(size in (-1, own) for size, own in zip(wished, t.shape, strict=True))


def _sliced(t: LazyTensor, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Any:
    """Some rows of a tensor, real; `None` if that is not what is asked for."""
    dim = dim % t.dim()
    first, last, _ = slice(start, stop).indices(t.shape[dim])
    if step != 1 or dim == t.dim() - 1 or first >= last:
        return None
    return t.fetch_part(dim, first, last)()


class Assembly:
    """A tensor that is written part by part: on the device, or to the host if `memory` is given.

    Args:
        shape: Of the tensor.
        dtype: Its type.
        device: Where parts come from.
        at_once: As of :class:`LazyTensor`.
        memory: Gives room on the host.
        name: What it is.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        at_once: int = 0,
        memory: SlotMemory | None = None,
        name: str = "hidden states",
    ) -> None:
        self._shape, self._dim = tuple(shape), 0
        self._missing = math.prod(self._shape[:-1])
        self._tensor: Tensor
        self._host: HostRows | None = None
        if memory is None:
            self._tensor = torch.empty(self._shape, dtype=dtype, device=device)
        else:
            self._host = HostRows(memory, self._missing, self._shape[-1], dtype, name)
            self._tensor = LazyTensor(self._host, self._shape, dtype, device, at_once, memory)

    @classmethod
    def like(cls, t: Tensor) -> Assembly:
        """For a tensor like `t`, and where `t` is."""
        if isinstance(t, LazyTensor):
            return cls(t.shape, t.dtype, t.device, t.at_once, t.memory)
        return cls(t.shape, t.dtype, t.device)

    def write(self, dim: int, start: int, part: Tensor) -> None:
        """Write the entries of a dimension from `start` on."""
        self._missing -= part.shape[:-1].numel()
        if self._host is None:
            self._tensor.narrow(dim, start, part.shape[dim]).copy_(part)
            return
        rows = part_rows(self._shape, dim, start, start + part.shape[dim])
        flat = part.reshape(-1, part.shape[-1])
        for place, piece in zip(rows, flat.split([len(r) for r in rows]), strict=True):
            self._host.write(place.start, piece)

    def write_rows(self, first: int, rows: Tensor) -> None:
        """Write rows, which are counted over all dimensions but the last."""
        rows = rows.reshape(-1, rows.shape[-1])
        self._missing -= len(rows)
        if self._host is None:
            self._tensor.view(-1, self._shape[-1])[first : first + len(rows)].copy_(rows)
        else:
            self._host.write(first, rows)

    def take(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: Some part was never written.
        """
        if self._missing:
            raise RuntimeError(f"{self._missing} rows of a tensor {list(self._shape)} were never written")
        return self._tensor


def read_parts(t: Tensor, dim: int, bounds: Iterable[tuple[int, int]]) -> Iterator[Tensor]:
    """The entries `[start, stop)` of a dimension, one after the other, without history; each comes before its turn."""
    if not isinstance(t, LazyTensor):
        return (t.detach().narrow(dim, start, stop - start) for start, stop in bounds)
    return _ahead(lambda part: t.fetch_part(dim, *part), bounds)


def read_rows(t: LazyTensor, at_once: int) -> Iterator[Tensor]:
    """All rows in order, `[at most at_once, features]`; each part arrives before its turn."""
    count = t.shape[:-1].numel()
    parts = [range(first, min(first + at_once, count)) for first in range(0, count, at_once)]
    return _ahead(lambda part: t.fetch([part]), parts)


def _ahead(fetch: Callable[[Any], Arrival], parts: Iterable[Any]) -> Iterator[Tensor]:
    arriving: deque[Arrival] = deque()
    try:
        for part in parts:
            arriving.append(fetch(part))
            if len(arriving) > 1:
                yield arriving.popleft()()
        while arriving:
            yield arriving.popleft()()
    finally:
        for arrival in arriving:  # its memory must not go before the copy has ended
            arrival()


def real(t: Tensor) -> Tensor:
    """A tensor that is no `LazyTensor`, differentiably."""
    return _Real.apply(t) if isinstance(t, LazyTensor) else t


class _Real(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: LazyTensor) -> Tensor:
        whole = t.materialize()
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
