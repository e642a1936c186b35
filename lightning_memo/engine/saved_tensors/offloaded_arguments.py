"""Arguments that all layers share for one slice of a sequence (rotary tables, masks), which wait on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memo.engine.copy_streams import CopyEvent
from lightning_memo.engine.memory.host_arena import HostBuffer
from lightning_memo.engine.memory.saved_storages import flat, is_dense, span
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.planner.token_slices import SavedBytes, TokenRange, aligned


@dataclass(frozen=True, slots=True)
class Parked:
    """Stands for an argument that waits on the host.

    Attributes:
        number: Number of the argument.
    """

    number: int


@dataclass(frozen=True, slots=True)
class OffloadedArgument:
    """Stands for a saved tensor that is a view of an argument.

    Attributes:
        number: Number of the argument.
        shape: Shape of the view.
        stride: Strides of the view.
        offset: Offset in the argument, in elements.
    """

    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def parkable(arguments: Any) -> list[Tensor]:
    """Return the tensors among a layer's arguments that can wait on the host, each once."""
    found = {id(t): t for t in tree_leaves(arguments) if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)}
    return [t for t in found.values() if t.dim() and t.numel() and is_dense(t)]


class SliceArguments:
    """The tensors among the arguments of a slice's layer calls, which layers of one class share.

    Args:
        memory: Allocates host memory, and copies.
        part: The slice.
    """

    def __init__(self, memory: SlotMemory, part: TokenRange) -> None:
        self._memory, self._part = memory, part
        self._tensors: list[Tensor] = []
        self._layouts: list[tuple[torch.Size, tuple[int, ...], torch.dtype]] = []
        self._buffers: list[HostBuffer] = []
        self._events: list[CopyEvent] = []

    def add(self, arguments: Any) -> None:
        """Add the arguments of one more layer."""
        known = {id(t) for t in self._tensors}
        for t in parkable(arguments):
            if id(t) not in known:
                self._tensors.append(t)
                self._layouts.append((t.shape, t.stride(), t.dtype))

    @property
    def saved(self) -> list[SavedBytes]:
        """Sizes of the tensors that are going to wait on the host."""
        return [SavedBytes("shared", t.nbytes) for t in self._tensors]

    def park(self, arguments: Any) -> Any:
        """Return the arguments with a `Parked` in place of each tensor that was added."""
        numbers = {id(t): n for n, t in enumerate(self._tensors)}
        return tree_map(lambda leaf: Parked(numbers[id(leaf)]) if id(leaf) in numbers else leaf, arguments)

    def view_of(self, t: Tensor) -> OffloadedArgument | None:
        """Return the view that stands for a saved tensor; `None` if the tensor lies in no argument."""
        storage = t.untyped_storage()._cdata
        for number, argument in enumerate(self._tensors):
            start = t.storage_offset() - argument.storage_offset()
            same = argument.untyped_storage()._cdata == storage and argument.dtype == t.dtype
            if same and start >= 0 and start + span(t) <= argument.numel():  # arguments may be parts of one tensor
                return OffloadedArgument(number, t.shape, t.stride(), start)
        return None

    def leave(self) -> None:
        """End the slice's forward: start copying the tensors to the host."""
        for t in self._tensors:
            self._buffers.append(self._memory.take_host_buffer(aligned(t.nbytes)))
            self._events.append(self._memory.copy_to_host(self._buffers[-1], 0, flat(t).view(torch.uint8)))

    def settle(self) -> None:
        """Wait for copies, and free the tensors on the device."""
        while self._events:
            self._events.pop().wait()
        self._tensors = []

    def fetch(self) -> None:
        """Start copying the tensors back, if they are not on the device."""
        if self._tensors:
            return
        for buffer, (shape, stride, dtype) in zip(self._buffers, self._layouts, strict=True):
            t = torch.empty_strided(shape, stride, dtype=dtype, device=self._memory.device)
            self._events.append(self._memory.copy_from_host(flat(t).view(torch.uint8), buffer))
            self._tensors.append(t)

    def restore(self, arguments: Any) -> Any:
        """Return arguments with their tensors in place of each `Parked` and `OffloadedArgument`."""
        while self._events:
            self._events.pop().wait()

        def tensor(leaf: Any) -> Any:
            if isinstance(leaf, Parked):
                return self._tensors[leaf.number]
            if isinstance(leaf, OffloadedArgument):
                argument = self._tensors[leaf.number]
                return argument.as_strided(leaf.shape, leaf.stride, argument.storage_offset() + leaf.offset)
            return leaf

        return tree_map(tensor, arguments)

    def release(self) -> None:
        """End the slice's backward: free the tensors and their host memory."""
        self.settle()
        while self._buffers:
            self._buffers.pop().release()
