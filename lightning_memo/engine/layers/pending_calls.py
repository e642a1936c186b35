"""The layer calls of a step whose backward has not ended."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Protocol

import torch


class PendingCall(Protocol):
    """A layer call from its forward to the end of its backward."""

    @property
    def key(self) -> int:
        """Position among the calls that are alive."""

    @property
    def in_backward(self) -> bool:
        """Whether the backward has begun and not ended."""


class PendingCalls:
    """Layer calls in the order of the forward. A call whose graph is dropped leaves by itself."""

    def __init__(self) -> None:
        self._calls: weakref.WeakValueDictionary[int, PendingCall] = weakref.WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[PendingCall]:
        return iter([call for _, call in sorted(self._calls.items())])

    @property
    def next_key(self) -> int:
        """The position of a call that begins now."""
        return max(self._calls.keys(), default=-1) + 1

    @property
    def interrupted(self) -> bool:
        """Whether an exception ended a backward half-way. PyTorch keeps the rest of its graph until the next step."""
        inside = torch._C._current_graph_task_id() != -1
        return not inside and any(call.in_backward for call in self._calls.values())

    def add(self, call: PendingCall) -> None:
        """Add a call that begins."""
        self._calls[call.key] = call

    def remove(self, call: PendingCall) -> None:
        """Remove a call whose backward has ended."""
        if self._calls.get(call.key) is call:
            del self._calls[call.key]

    def clear(self) -> None:
        """Forget all calls of an interrupted step."""
        self._calls.clear()
