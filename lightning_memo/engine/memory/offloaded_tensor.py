"""Tensors with one row per token, of which only a few rows are on the device at a time.

The rows are on the host, or they are computed when they are read. With `stream_from_host="hidden"`, the hidden states
between layers are offloaded. Layers, the last norm and the loss read and write them slice by slice. Other operations
get a real tensor that is computed once, which is correct but takes as much device memory as in plain training; so do
readers of memory (NumPy, pickle, DLPack). All aliases use the real tensor from then on, and its views are views of
them, so that writes in place reach all of them. Rows of which there is no real tensor never change.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import Self, override

from lightning_memo.engine.copy_streams import CopyEvent
from lightning_memo.engine.memory.slot_memory import SlotMemory

# Waits for rows that are being fetched, and returns them: `[rows, features]`.
Arrival = Callable[[], Tensor]
RowFunction = Callable[[Tensor], Tensor]


class Rows(ABC):
    """A matrix `[rows, features]` of which some rows at a time are brought to the device."""

    @abstractmethod
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        """Start bringing ranges of rows to the device, and return what waits for them; the ranges are concatenated."""


class DeviceRows(Rows):
    """Rows that are on the device."""

    def __init__(self, matrix: Tensor) -> None:
        self._matrix = matrix

    @override
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        parts = [self._matrix[rows.start : rows.stop] for rows in ranges]
        return lambda: torch.cat(parts) if len(parts) > 1 else parts[0]


class ComputedRows(Rows):
    """Rows that are computed every time they are fetched."""

    def __init__(self, compute: Callable[[Sequence[range]], Tensor]) -> None:
        self._compute = compute

    @override
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        return lambda: self._now(ranges)

    @torch.no_grad()
    def _now(self, ranges: Sequence[range]) -> Tensor:
        return self._compute(ranges)


class MappedRows(Rows):
    """A function of each row of another matrix."""

    def __init__(self, rows: Rows, function: RowFunction) -> None:
        self._rows, self._function = rows, function

    @override
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        arrival = self._rows.fetch(ranges)

        def arrive() -> Tensor:
            with torch.no_grad():
                return self._function(arrival())

        return arrive


class HostRows(Rows):
    """Rows in a host buffer. They are written before they are fetched.

    Args:
        memory: Provides the host buffer and the copies.
        rows: Number of rows.
        features: Number of entries of each row.
        dtype: Data type of the entries.
    """

    def __init__(self, memory: SlotMemory, rows: int, features: int, dtype: torch.dtype) -> None:
        self._device, self._features, self._dtype = memory.device, features, dtype
        self._row_bytes = features * dtype.itemsize
        self._buffer = memory.take_host_buffer(rows * self._row_bytes, memory.states)
        self._leaving: deque[tuple[Tensor, CopyEvent]] = deque()

    def write(self, first: int, rows: Tensor) -> None:
        """Start copying `rows` `[..., features]` to the host; they become the rows from number `first` on."""
        self._free_sources(1)
        source = rows.detach().contiguous().view(-1).view(torch.uint8)
        self._leaving.append((source, self._buffer.write(source, first * self._row_bytes)))

    def _free_sources(self, kept: int) -> None:
        """Free the device memory of copied rows, except for that of the last `kept` copies."""
        while len(self._leaving) > kept:
            source, copied = self._leaving.popleft()
            copied.wait()
            del source  # only now, because its memory is used again by what is computed next

    @override
    def fetch(self, ranges: Sequence[range]) -> Arrival:
        if not self._buffer.alive:
            raise RuntimeError(
                "hidden states were read after their step, when the host memory that held them had been freed: copy "
                'what you need and run each backward within the step, or set stream_from_host="attention"'
            )
        self._free_sources(0)
        count = sum(map(len, ranges))
        data = torch.empty(count * self._row_bytes, dtype=torch.uint8, device=self._device)
        pieces = data.split([len(rows) * self._row_bytes for rows in ranges])
        events = [
            self._buffer.read(piece, rows.start * self._row_bytes) for piece, rows in zip(pieces, ranges, strict=True)
        ]

        def arrive() -> Tensor:
            while events:
                events.pop().wait()
            return data.view(self._dtype).view(count, self._features)

        return arrive


def part_rows(shape: Sequence[int], dim: int, start: int, stop: int) -> list[range]:
    """Return the rows of the entries `[start, stop)` of a dimension.

    Args:
        shape: Shape of the tensor. Rows are counted over all dimensions but the last.
        dim: The dimension; not the last one.
        start: First entry.
        stop: End of the entries.
    """
    inner, size = math.prod(shape[dim + 1 : -1]), shape[dim]
    return [range((n * size + start) * inner, (n * size + stop) * inner) for n in range(math.prod(shape[:dim]))]


aten = torch.ops.aten
_ALIASES = (aten.detach.default, aten.alias.default)
_CAST_ARGUMENTS = {"dtype"}


class _Source:
    """The rows of a tensor, shared with its aliases, or the real tensor once it has been computed."""

    def __init__(self, rows: Rows | None, real: Tensor | None = None) -> None:
        self._rows, self.real = rows, real

    @property
    def rows(self) -> Rows:
        """The rows, with the values that they have now."""
        if self.real is not None:
            return DeviceRows(self.real.reshape(-1, self.real.shape[-1]))
        assert self._rows is not None
        return self._rows

    def make_real(self, shape: Sequence[int]) -> Tensor:
        """Return the real tensor of this shape."""
        if self.real is None:
            self.real = self.rows.fetch([range(math.prod(shape[:-1]))])().view(tuple(shape))
            self._rows = None
        return self.real


def _of_plain(name: str) -> Any:
    """Return a method of `Tensor` that runs on the real tensor of an `OffloadedTensor`."""

    def method(self: OffloadedTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._as_plain(), name)(*args, **kwargs)

    return method


class OffloadedTensor(Tensor):
    """A tensor `[..., features]` whose rows are brought to the device when they are read.

    Args:
        source: The rows.
        shape: Shape of the tensor.
        dtype: Data type of the tensor.
        device: Device to which the rows are brought.
        at_once: Number of rows that may be on the device at the same time.
        memory: Provides host buffers for tensors that are computed from this one slice by slice; `None` if it is not
            known yet.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, source: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *_: Any) -> Self:
        created = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        torch._C._set_throw_on_mutable_data_ptr(created)  # compiled code would crash that reads memory by itself
        return created

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

    @property
    def source(self) -> object:
        """Identifies the rows, which aliases share."""
        return self._source

    @property
    def is_real(self) -> bool:
        """Whether there is a real tensor, into which others may write."""
        return self._source.real is not None

    def fetch(self, ranges: Sequence[range]) -> Arrival:
        """Start bringing rows to the device. Rows are counted over all dimensions but the last."""
        return self._source.rows.fetch(ranges)

    def fetch_part(self, dim: int, start: int, stop: int) -> Arrival:
        """Start bringing `self.narrow(dim, start, stop - start)` to the device; `dim` is not the last one."""
        shape = (*self.shape[:dim], stop - start, *self.shape[dim + 1 :])
        arrival = self.fetch(part_rows(self.shape, dim, start, stop))
        return lambda: arrival().view(shape)

    def mapped(self, function: RowFunction, dtype: torch.dtype) -> OffloadedTensor:
        """Return an offloaded tensor of the same shape that is `function` of each row, without autograd history.

        There must be no real tensor, which could change before the rows are read.
        """
        assert not self.is_real
        rows = MappedRows(self._source.rows, function)
        return OffloadedTensor(rows, self.shape, dtype, self.device, self.at_once, self.memory)

    def materialize(self) -> Tensor:
        """Return the real tensor, which is computed once. All aliases use it from then on."""
        with self._own_mode():
            return self._source.make_real(self.shape)

    def _as_plain(self) -> Tensor:
        """Return a real tensor that has the same place in the graph."""
        return self.materialize().detach().requires_grad_(self.requires_grad) if self.is_leaf else real(self)

    # What reads or writes memory without an operation.
    numpy = _of_plain("numpy")
    tolist = _of_plain("tolist")
    data_ptr = _of_plain("data_ptr")
    untyped_storage = _of_plain("untyped_storage")
    apply_ = _of_plain("apply_")
    map_ = _of_plain("map_")
    __dlpack__ = _of_plain("__dlpack__")
    __repr__ = _of_plain("__repr__")
    __reduce_ex__ = _of_plain("__reduce_ex__")
    __deepcopy__ = _of_plain("__deepcopy__")

    @property
    @override
    def data(self) -> Tensor:  # type: ignore[override]
        """An alias, into which writes count no change."""
        data: Tensor = super().data
        return data

    @data.setter
    def data(self, values: Tensor) -> None:
        if (values.shape, values.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"hidden states {list(self.shape)} of {self.dtype} got data {list(values.shape)} of {values.dtype}: "
                "compute a new tensor instead"
            )
        self._source = _Source(None, real(values.detach()))

    def _alias(self) -> OffloadedTensor:
        with self._own_mode():
            return OffloadedTensor(self._source, self.shape, self.dtype, self.device, self.at_once, self.memory)

    @contextlib.contextmanager
    def _own_mode(self) -> Iterator[None]:
        """Leave an inference mode that was entered after the forward: the tensor is part of a graph."""
        if self.is_inference() == torch.is_inference_mode_enabled():
            yield
            return
        tracked = torch.is_grad_enabled()
        with torch.inference_mode(self.is_inference()), torch.set_grad_enabled(tracked):
            yield

    @classmethod
    @override
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, OffloadedTensor):
            if func in _ALIASES or (func is aten.view.default and _is_shape_of(first, args[1])):
                return first._alias()
            given = {name for name, value in kwargs.items() if value is not None}
            if func is aten._to_copy.default and given == _CAST_ARGUMENTS and not first.is_real:
                dtype = kwargs["dtype"]
                return first.mapped(lambda rows: rows.to(dtype), dtype)
            if torch.Tag.inplace_view in func.tags:
                return first._reshape(func, args, kwargs)
        lazy = {id(t.materialize()): t for t in tree_leaves((args, kwargs)) if isinstance(t, OffloadedTensor)}
        args, kwargs = tree_map_only(OffloadedTensor, OffloadedTensor.materialize, (args, kwargs))
        # Operations in place, and those that are given their output, return what they were given.
        return tree_map_only(Tensor, lambda t: lazy.get(id(t), t), func(*args, **kwargs))

    def _reshape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OffloadedTensor:
        """Run an operation that changes the shape of its first argument in place, which changes no alias."""
        real = self.materialize().detach()
        func(real, *args[1:], **kwargs)
        self._source = _Source(None, real)
        with no_dispatch():  # PyTorch's own record of the shape
            func(*args, **kwargs)
        return self


def _is_shape_of(t: Tensor, requested: Sequence[int]) -> bool:
    return len(requested) == t.dim() and all(size in (-1, own) for size, own in zip(requested, t.shape, strict=True))


class TensorBuilder:
    """Assembles a tensor from parts: on the device, or in a host buffer if `memory` is given.

    Args:
        shape: Shape of the tensor.
        dtype: Data type of the tensor.
        device: Device of the parts.
        at_once: See :class:`OffloadedTensor`.
        memory: Provides the host buffer.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        at_once: int = 0,
        memory: SlotMemory | None = None,
    ) -> None:
        self._shape, self._dim = tuple(shape), 0
        self._missing = math.prod(self._shape[:-1])
        self._tensor: Tensor
        self._host: HostRows | None = None
        if memory is None:
            self._tensor = torch.empty(self._shape, dtype=dtype, device=device)
        else:
            self._host = HostRows(memory, self._missing, self._shape[-1], dtype)
            self._tensor = OffloadedTensor(self._host, self._shape, dtype, device, at_once, memory)

    @classmethod
    def like(cls, t: Tensor) -> TensorBuilder:
        """Create a builder for a tensor with the shape, dtype and location of `t`."""
        if isinstance(t, OffloadedTensor):
            return cls(t.shape, t.dtype, t.device, t.at_once, t.memory)
        return cls(t.shape, t.dtype, t.device)

    def write(self, dim: int, start: int, part: Tensor) -> None:
        """Write a part: the entries of a dimension from `start` on."""
        self._missing -= part.shape[:-1].numel()
        if self._host is None:
            self._tensor.narrow(dim, start, part.shape[dim]).copy_(part)
            return
        rows = part_rows(self._shape, dim, start, start + part.shape[dim])
        flat = part.reshape(-1, part.shape[-1])
        for each, piece in zip(rows, flat.split([len(r) for r in rows]), strict=True):
            self._host.write(each.start, piece)

    def write_rows(self, first: int, rows: Tensor) -> None:
        """Write rows from number `first` on. Rows are counted over all dimensions but the last."""
        rows = rows.reshape(-1, rows.shape[-1])
        self._missing -= len(rows)
        if self._host is None:
            self._tensor.view(-1, self._shape[-1])[first : first + len(rows)].copy_(rows)
        else:
            self._host.write(first, rows)

    def take(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: A part was never written.
        """
        if self._missing:
            raise RuntimeError(f"{self._missing} rows of a tensor {list(self._shape)} were never written")
        return self._tensor


def on_host(t: Tensor, memory: SlotMemory) -> Tensor:
    """Return a tensor without autograd history whose rows are on the host, or computed when they are read."""
    if isinstance(t, OffloadedTensor) and not t.is_real:
        return t.detach()
    builder = TensorBuilder(t.shape, t.dtype, t.device, t.shape[:-1].numel(), memory)
    builder.write_rows(0, real(t.detach()))
    return builder.take()


def read_parts(t: Tensor, dim: int, bounds: Iterable[tuple[int, int]]) -> Iterator[Tensor]:
    """Iterate over the parts `[start, stop)` of a dimension, without autograd history; each part is fetched ahead."""
    if not isinstance(t, OffloadedTensor) or t.is_real:  # parts of which are views, so that writes into them count
        return (t.detach().narrow(dim, start, stop - start) for start, stop in bounds)
    return _ahead(lambda part: t.fetch_part(dim, *part), bounds)


def read_rows(t: OffloadedTensor, at_once: int) -> Iterator[Tensor]:
    """Iterate over all rows in parts of at most `[at_once, features]`; each part is fetched ahead."""
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
        for arrival in arriving:  # the memory must not be freed before the copy has ended
            arrival()


def part_of(t: Tensor, dim: int, start: int, stop: int) -> Tensor:
    """Return the entries `[start, stop)` of a dimension, differentiably. An `OffloadedTensor` brings only these."""
    if not isinstance(t, OffloadedTensor) or t.is_real or dim == t.dim() - 1:
        return t.narrow(dim, start, stop - start)
    part: Tensor = _Part.apply(t, dim, start, stop)
    return part


class _Part(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: OffloadedTensor, dim: int, start: int, stop: int) -> Tensor:
        ctx.place = t.shape, dim, start
        return t.fetch_part(dim, start, stop)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        shape, dim, start = ctx.place
        whole = gradient.new_zeros(shape)
        whole.narrow(dim, start, gradient.shape[dim]).copy_(gradient)
        return whole, None, None, None


def real(t: Tensor) -> Tensor:
    """Return the real tensor of an `OffloadedTensor`, differentiably, and any other tensor as it is."""
    return _Real.apply(t) if isinstance(t, OffloadedTensor) else t


class _Real(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: OffloadedTensor) -> Tensor:
        tensor = t.materialize()
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
