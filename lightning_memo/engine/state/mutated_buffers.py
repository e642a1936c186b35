"""Buffers that a layer changes in its own forward, for example running statistics, maxima or a counter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_memo.engine.memory.noted_tensors import version_of
from lightning_memo.engine.saved_tensors.wrapper_subclasses import plain_parts


@dataclass(frozen=True, slots=True)
class _Buffer:
    """A buffer and its value. A forward may change the tensor in place, or register another one.

    What was written once may change at another time, as maxima do.
    """

    owner: nn.Module
    name: str
    tensor: Tensor
    value: Tensor
    version: int

    @property
    def changed(self) -> bool:
        present = self.owner._buffers.get(self.name)
        # `data` can be written without being counted.
        return present is not self.tensor or version_of(present) != self.version or not same_bytes(present, self.value)

    def restore(self) -> None:
        self.tensor.data.copy_(self.value)  # `data`, so that a graph that has saved the buffer does not see a change
        self.owner._buffers[self.name] = self.tensor


class MutatedBuffers:
    """Copies of buffers of a layer, by which they can be restored.

    Args:
        layer: The layer.
        names: Names of the buffers; `None` for all buffers.
    """

    def __init__(self, layer: nn.Module, names: Iterable[str] | None = None) -> None:
        self._layer = layer
        wanted = dict(layer.named_buffers()) if names is None else names
        self._buffers = {name: _noted(layer, name) for name in wanted}

    @property
    def ids(self) -> set[int]:
        """Ids of the tensors."""
        return {id(buffer.tensor) for buffer in self._buffers.values()}

    def changed(self) -> tuple[str, ...]:
        """Return the names of the buffers that were written, also if they got the values that they had."""
        return tuple(name for name, buffer in self._buffers.items() if buffer.changed)

    def restore(self, names: Iterable[str] | None = None) -> None:
        """Restore the buffers of these names; `None` for all buffers."""
        for name in self._buffers if names is None else names:
            self._buffers[name].restore()

    @contextlib.contextmanager
    def replayed(self) -> Iterator[None]:
        """Restore the buffers inside the context, and put their present values back afterwards."""
        present = MutatedBuffers(self._layer, self._buffers)
        self.restore()
        try:
            yield
        finally:
            present.restore()


@torch.no_grad()
def _noted(layer: nn.Module, name: str) -> _Buffer:
    path, _, own = name.rpartition(".")
    owner = layer.get_submodule(path)
    tensor = owner._buffers[own]
    assert tensor is not None
    return _Buffer(owner, own, tensor, tensor.detach().clone(), version_of(tensor))


class BufferVersions:
    """Counts of changes of a layer's buffers, by which a write is found without copies.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._noted = layer, [(name, t, version_of(t)) for name, t in layer.named_buffers()]

    def first_written(self) -> str:
        """Return the name of the first buffer that was written or replaced since; empty if there is none."""
        present = dict(self._layer.named_buffers()) if self._noted else {}
        written = (name for name, t, number in self._noted if present.get(name) is not t or version_of(t) != number)
        return next(written, "")


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same shape and dtype, and hold the same. NaN equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    pairs = zip(plain_parts(a), plain_parts(b), strict=True)
    return all(torch.equal(_bytes(x), _bytes(y)) for x, y in pairs)


def _bytes(t: Tensor) -> Tensor:
    return t.detach().contiguous().flatten().view(torch.uint8)
