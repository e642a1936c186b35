"""Finds writes to saved tensors that autograd does not notice: through `t.data`, which counts changes by itself.

Plain training then computes with what was written. A tensor that was swapped has the values that were saved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.memory.saved_storages import byte_range, counter_of, span
from lightning_memo.engine.saved_tensors.side_effects import written_in_schema


class _Places(NamedTuple):
    """Where the values of a tensor are in its storage, in units of their size."""

    itemsize: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int

    @staticmethod
    def of(t: Tensor) -> _Places:
        start = t.storage_offset()
        return _Places(t.itemsize, tuple(t.shape), t.stride(), start, start + span(t))

    def overlap(self, other: _Places) -> bool:
        """Return whether any value is in both: the columns of a matrix share a range of bytes, but no values."""
        if self.itemsize != other.itemsize:
            return True
        taken = torch.zeros(max(self.stop, other.stop), dtype=torch.bool)
        taken.as_strided(self.size, self.stride, self.start).fill_(True)
        return bool(taken.as_strided(other.size, other.stride, other.start).any())


class _Saved(NamedTuple):
    """The bytes of a saved tensor.

    Attributes:
        storage: Its storage, which must not live longer than without this.
        start: Its first byte.
        stop: The end of its bytes.
        places: Where its values are.
        counter: A tensor without bytes that counts the changes of the saved one.
        version: The number of changes when it was saved.
    """

    storage: StorageWeakRef
    start: int
    stop: int
    places: _Places
    counter: Tensor
    version: int


class HiddenWrites(TorchDispatchMode):
    """Notes writes inside this context that autograd does not notice.

    Args:
        call: The layer and its arguments, whose parameters, buffers and arguments are left out.
    """

    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self._name = call.name
        held = [*call.layer.parameters(), *call.layer.buffers(), *tree_leaves((call.args, call.kwargs))]
        self._held = {t.untyped_storage()._cdata for t in held if _is_plain(t)}
        self._saved: dict[int, list[_Saved]] = {}
        self._written: list[_Saved] = []

    def note(self, t: Tensor) -> None:
        """Note that autograd saves a tensor."""
        if not _is_plain(t) or t.is_inference() or (key := t.untyped_storage()._cdata) in self._held:
            return
        storage = StorageWeakRef(t.untyped_storage())
        saved = _Saved(storage, *byte_range(t), _Places.of(t), counter_of(t), t._version)
        self._saved.setdefault(key, []).append(saved)

    def refuse(self) -> None:
        """Refuse writes to saved tensors that count no change.

        Raises:
            ValueError: There was one.
        """
        if any(saved.counter._version == saved.version for saved in self._written):
            raise ValueError(
                f"{self._name} writes through .data into its input, or into a tensor that autograd has saved, and what "
                "is swapped are the values before that: write into a copy (t = t.clone())"
            )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in filter(_is_plain, written_in_schema(func, args, kwargs or {})):
            start, stop = byte_range(t)
            for saved in self._saved.get(t.untyped_storage()._cdata, ()):
                near = saved.start < stop and start < saved.stop and not saved.storage.expired()
                if near and saved.places.overlap(_Places.of(t)):
                    self._written.append(saved)
        return func(*args, **kwargs or {})


def _is_plain(t: Any) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
