"""Storages of saved tensors: their memory layout, and a registry of the storage ranges that were saved before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_memo.engine.memory.noted_tensors import version_of

POISON = 0xFF  # a NaN in every floating-point format

Value = TypeVar("Value")


def resolved(t: Tensor) -> Tensor:
    """Return a tensor whose bytes are its values: not a lazily conjugated or negated view of others."""
    return t.resolve_conj().resolve_neg() if t.is_conj() or t.is_neg() else t


def is_dense(t: Tensor) -> bool:
    """Return whether `t` covers one range of its storage without gaps, in any order of its dimensions."""
    return span(t) == t.numel()


def span(t: Tensor) -> int:
    """Return the number of storage elements from the first to the last one that `t` covers."""
    return sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) + 1


def byte_range(t: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the end of its bytes."""
    start = t.storage_offset() * t.itemsize
    return start, start + span(t) * t.itemsize


def flat(t: Tensor) -> Tensor:
    """View the storage range that a dense tensor covers as one dimension."""
    return torch.as_strided(t, (t.numel(),), (1,), t.storage_offset())


def gapless_strides(shape: Sequence[int], like: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor of `shape` without gaps whose dimensions have the memory order of `like`.

    The order matters because kernels choose their arithmetic by it and random numbers fill memory in order. Expanded
    dimensions have no place in the order; they get the one that PyTorch gives them in a copy.
    """
    expanded = any(size > 1 and stride == 0 for size, stride in zip(like.shape, like.stride(), strict=True))
    ordered = torch.empty_like(torch.empty_strided(like.shape, like.stride(), device="meta")) if expanded else like
    order = sorted(range(like.dim()), key=ordered.stride, reverse=True)
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
    layout: tuple[torch.Size, tuple[int, ...]] | None  # shape and strides of a tensor with gaps, whose copy has none
    version: int
    value: Value

    def covers(self, start: int, stop: int, t: Tensor) -> bool:
        if self.version != version_of(t):  # the tensor was changed in place since
            return False
        if self.layout is not None:
            return self.start == start and self.layout == (t.shape, t.stride())
        return self.start <= start and stop <= self.stop


class Registry(Generic[Value]):
    """Maps the storage ranges of tensors to values, and finds them through other views of the same bytes as well.

    Storage addresses are reused as soon as a tensor is freed. A weak reference per entry distinguishes a freed storage
    from a new one at the same address; keys that are addresses only would give silently wrong gradients.
    """

    def __init__(self) -> None:
        self._entries: dict[int, list[_Entry[Value]]] = {}

    def find(self, t: Tensor) -> tuple[Value, int] | None:
        """Return the value of the newest range that contains `t`, and the offset of `t` in it in bytes, or `None`."""
        entries = self._entries.get(t.untyped_storage()._cdata)
        if entries is None:  # so it is for most tensors
            return None
        start, stop = byte_range(t)
        for entry in reversed(entries):
            if not entry.storage.expired() and entry.covers(start, stop, t):
                return entry.value, start - entry.start
        return None

    def add(self, t: Tensor, value: Value) -> None:
        """Register the storage range of `t`."""
        start, stop = byte_range(t)
        layout = None if is_dense(t) else (t.shape, t.stride())
        entry = _Entry(StorageWeakRef(t.untyped_storage()), start, stop, layout, version_of(t), value)
        self._entries.setdefault(t.untyped_storage()._cdata, []).append(entry)

    def clear(self) -> None:
        self._entries.clear()
