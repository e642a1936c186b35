"""Where a saved tensor's bytes lie: regions of a slot, and which of them already hold a given tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

POISON = 0xFF  # a NaN in every floating-point format

Value = TypeVar("Value")


def is_dense(t: Tensor) -> bool:
    """Whether `t` covers one gapless range of its storage (in any order of its dimensions)."""
    return span(t) == t.numel()


def span(t: Tensor) -> int:
    """Elements from the first to the last that `t` covers in its storage."""
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1


def flat(t: Tensor) -> Tensor:
    """The range of storage that a dense tensor covers, as one dimension."""
    return torch.as_strided(t, (t.numel(),), (1,), t.storage_offset())


def gapless_strides(shape: Sequence[int], like: Tensor) -> tuple[int, ...]:
    """Strides of a tensor of `shape` without gaps, whose dimensions lie in memory in the order of those of `like`.

    The order matters: kernels pick their arithmetic by it, and random numbers fill memory in order.
    """
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= shape[d]
    return tuple(strides)


@dataclass(frozen=True, slots=True)
class _Entry(Generic[Value]):
    storage: StorageWeakRef
    start: int
    stop: int
    layout: tuple[torch.Size, tuple[int, ...]] | None  # of a tensor with gaps, whose copy is compact
    version: int
    value: Value

    def covers(self, start: int, stop: int, t: Tensor) -> bool:
        if self.version != t._version:  # changed in place since: other contents
            return False
        if self.layout is not None:
            return self.start == start and self.layout == (t.shape, t.stride())
        return self.start <= start and stop <= self.stop


class Registry(Generic[Value]):
    """Finds what was noted of a tensor's bytes, also through views of them.

    Storage addresses are reused as soon as a tensor dies; a weak reference per entry tells a dead storage from a new
    one at the same address. Keying by address alone gives silently wrong gradients.
    """

    def __init__(self) -> None:
        self._entries: dict[int, list[_Entry[Value]]] = {}

    def find(self, t: Tensor) -> tuple[Value, int] | None:
        """What was noted of the bytes of `t`, and how many bytes into that `t` begins."""
        start, stop = self._range(t)
        for entry in self._entries.get(t.untyped_storage()._cdata, ()):
            if not entry.storage.expired() and entry.covers(start, stop, t):
                return entry.value, start - entry.start
        return None

    def add(self, t: Tensor, value: Value) -> None:
        start, stop = self._range(t)
        layout = None if is_dense(t) else (t.shape, t.stride())
        entry = _Entry(StorageWeakRef(t.untyped_storage()), start, stop, layout, t._version, value)
        self._entries.setdefault(t.untyped_storage()._cdata, []).append(entry)

    def clear(self) -> None:
        self._entries.clear()

    @staticmethod
    def _range(t: Tensor) -> tuple[int, int]:
        start = t.storage_offset() * t.itemsize
        return start, start + span(t) * t.itemsize
