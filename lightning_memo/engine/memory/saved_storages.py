"""Storages of saved tensors: their layout, the ranges that were saved before, and values that are read later.

Note: [Values that are read later]
Chunked logits, lazy embeddings, recomputations and backwards read tensors that the user holds as well, and may change
meanwhile. What takes a few bytes for each token (ids, positions, padding masks) is copied, and so are hidden states of
which no graph is built. Every other tensor is noted, and compared when it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

_ROW_BYTES = 4096


@dataclass(frozen=True, slots=True)
class NotedTensor:
    """A tensor that stays where it is, and that nothing may change until it is read.

    Attributes:
        tensor: The tensor.
        version: Counts its changes in place; 0 for an inference tensor, which does not count them.
        sums: Sums of the bytes of an inference tensor; `None` for other tensors.
    """

    tensor: Tensor
    version: int
    sums: Tensor | None

    @classmethod
    def of(cls, t: Tensor) -> NotedTensor:
        """Note a tensor with its present values."""
        return cls(t, version_of(t), byte_sums(t) if t.is_inference() else None)

    @property
    def changed(self) -> bool:
        """Whether the tensor, or a view of the same memory, was changed in place since."""
        if self.sums is not None:
            return not torch.equal(byte_sums(self.tensor), self.sums)
        return version_of(self.tensor) != self.version

    def check(self, message: str) -> None:
        """Check that the tensor has the values that it had.

        Args:
            message: Says what was changed, and what to do.

        Raises:
            RuntimeError: It was changed in place.
        """
        if self.changed:
            raise RuntimeError(message)

    def unchanged(self, layer: str) -> Tensor:
        """Return the tensor.

        Args:
            layer: Name of the layer that saved it, for the message.

        Raises:
            RuntimeError: It was changed in place since the forward.
        """
        self.check(
            f"a weight, an argument or an activation of {layer}, of shape {list(self.tensor.shape)}, was changed "
            "in place between a forward and its backward, which needs its value: change it after the backward"
        )
        return self.tensor


def version_of(t: Tensor) -> int:
    """Return how often a tensor was changed in place. Inference tensors do not count."""
    return 0 if t.is_inference() else t._version


def counter_of(t: Tensor) -> Tensor:
    """Return a tensor without bytes that counts the changes of `t`, also when `t` is gone."""
    counter = t.detach()
    counter.data = t.new_empty(0)
    return counter


def byte_sums(t: Tensor) -> Tensor:
    """Return integers that are others for other bytes, or for the same bytes in another order, almost certainly.

    The bytes are a matrix, of whose rows and columns weighted sums are taken.
    """
    data = t.detach().contiguous().view(-1).view(torch.uint8)
    complete = data.numel() // _ROW_BYTES * _ROW_BYTES
    rest = F.pad(data[complete:], (0, _ROW_BYTES - data.numel() + complete))
    words = [piece.view(torch.int32).view(-1, _ROW_BYTES // 4) for piece in (data[:complete], rest)]
    return torch.stack([_weighted(piece.sum(dim, dtype=torch.int64)) for piece in words for dim in (0, 1)])


def _weighted(t: Tensor) -> Tensor:
    return (t * (2 * torch.arange(len(t), device=t.device) + 1)).sum()


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
