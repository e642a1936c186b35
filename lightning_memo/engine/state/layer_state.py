"""What a run of a layer may change, values of tensors among its attributes included, and what undoes it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.fp8_state import Fp8State
from lightning_memo.engine.memory.saved_storages import version_of
from lightning_memo.engine.saved_tensors.side_effects import address_of
from lightning_memo.engine.saved_tensors.wrapper_subclasses import plain_parts, put_back, same_bytes
from lightning_memo.engine.state.held_state import HeldState, HeldTensor
from lightning_memo.engine.state.random_states import OtherGenerators
from lightning_memo.kernels import RngState


class LayerState:
    """The random state, the buffers, attributes and arguments of a layer, and its FP8 state.

    Args:
        call: The layer and its arguments.
        device: Where the layer runs.

    Attributes:
        rng: The random state.
        held: What the modules and arguments hold.
    """

    @torch.no_grad()
    def __init__(self, call: LayerCall, device: torch.device) -> None:
        self.rng, self.held = RngState.capture(device), HeldState(call.layer, (call.args, call.kwargs))
        buffers = dict(call.layer.named_buffers())
        self._buffers = {name: _Copy.of(name, t) for name, t in buffers.items()}
        self._ids = set(map(id, buffers.values()))
        attributes = {id(each.tensor): each for each in self.held.tensors if each.is_copied}
        self._tensors = [_Copy.of(each.name, each.tensor) for key, each in attributes.items() if key not in self._ids]
        self._fp8 = Fp8State(call.layer)
        self._call, self._generators = call, OtherGenerators.of(self.held)

    def why_not_written(self, t: Tensor) -> str:
        """Return why the layer must not write into a tensor that was there before; empty if it can be undone."""
        return why_not_written(self._call, self.held, self._ids, t)

    def changed_buffers(self) -> tuple[str, ...]:
        """Return the names of the buffers that were written or replaced, also if they got the values that they had."""
        present = dict(self._call.layer.named_buffers())
        return tuple(name for name, copy in self._buffers.items() if copy.is_written(present.get(name)))

    def changed_tensor(self) -> str:
        """Return the name of the first tensor among the attributes whose values have changed; empty if none have."""
        return next((copy.name for copy in self._tensors if not same_bytes(copy.tensor, copy.value)), "")

    def first_written(self) -> str:
        """Return the name of something that the layer has written; empty if there is nothing."""
        buffers = (f"its buffer {name}" for name in self.changed_buffers())
        return self.held.first_written() or next(buffers, self.changed_tensor())

    def restore(self) -> None:
        """Undo what has changed."""
        self.held.restore()
        for copy in (*self._buffers.values(), *self._tensors):
            put_back(copy.tensor, copy.value)
        self._fp8.restore()
        self.restore_random()

    def restore_random(self) -> None:
        """Let the layer draw the same random numbers again."""
        self.rng.restore()
        self._generators.restore()


class _Copy(NamedTuple):
    """A tensor, its name for messages, and its value and version."""

    name: str
    tensor: Tensor
    value: Tensor
    version: int

    @classmethod
    def of(cls, name: str, t: Tensor) -> _Copy:
        return cls(name, t, t.detach().clone(), version_of(t))

    def is_written(self, present: Tensor | None) -> bool:
        """Return whether it was written, or `present` is in its place."""
        # `data` can be written without being counted.
        return present is not self.tensor or version_of(present) != self.version or not same_bytes(present, self.value)


def why_not_written(call: LayerCall, state: HeldState, buffers: Collection[int], t: Tensor) -> str:
    """Return why a layer must not write into a tensor that was there before; empty if it can be undone.

    Args:
        call: The layer and its arguments.
        state: What they hold.
        buffers: Ids of its buffers among them, which are restored in place. While it is probed, others replace them.
        t: The tensor, or a view of it.
    """

    def shared(other: Any) -> bool:
        return isinstance(other, Tensor) and any(address_of(part) == address_of(t) for part in plain_parts(other))

    held = [each for each in state.tensors if shared(each.tensor)]
    what, remedy = "a tensor outside of its modules and arguments", "register it as a buffer of the layer"
    if path := next((path for path, weight in call.layer.named_parameters() if shared(weight)), ""):
        what = f"its weight {path}"
        remedy = "compute with a changed copy, or change weights between steps, for example in on_train_batch_start"
    elif _can_be_undone(held, buffers):
        return ""
    elif any(map(shared, tree_leaves((call.args, call.kwargs)))):
        what, remedy = "a tensor that it gets as an argument", "write into a copy, and return it"
    elif held:
        what = f"{held[0].name}, which is no buffer"
    return f"{call.name} writes into {what}, and a recomputation would write again: {remedy}"


def _can_be_undone(held: Collection[HeldTensor], buffers: Collection[int]) -> bool:
    """Return whether what is written into a storage can be undone.

    Args:
        held: The tensors with this storage among the attributes of a layer.
        buffers: Ids of the layer's buffers.
    """
    found = {id(each.tensor): each.tensor for each in held}
    if found.keys() <= set(buffers):
        return bool(found)
    # A recomputation replaces other tensors by copies, which share nothing with each other.
    if len(found) > 1 or not all(each.is_copied for each in held):
        return False
    (t,) = found.values()
    return t.nbytes == t.untyped_storage().nbytes()
