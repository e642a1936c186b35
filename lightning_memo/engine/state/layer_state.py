"""What a run of a layer may change, tensors among its attributes included, and what undoes it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.fp8_state import Fp8State
from lightning_memo.engine.saved_tensors.side_effects import address_of
from lightning_memo.engine.saved_tensors.wrapper_subclasses import plain_parts
from lightning_memo.engine.state.held_values import name_of
from lightning_memo.engine.state.mutated_buffers import MutatedBuffers, same_bytes
from lightning_memo.engine.state.other_generators import OtherGenerators
from lightning_memo.engine.state.python_state import MOST_COPIED, HeldTensor, PythonState
from lightning_memo.kernels import RngState


class LayerState:
    """The random state, the buffers, attributes and arguments of a layer, and its FP8 state.

    Args:
        call: The layer and its arguments.
        device: Where the layer runs.

    Attributes:
        rng: The random state.
        buffers: The buffers.
        python: The attributes and the containers among the arguments.
        tensors: The small tensors among the attributes.
    """

    def __init__(self, call: LayerCall, device: torch.device) -> None:
        self.rng, self.buffers = RngState.capture(device), MutatedBuffers(call.layer)
        self.python = PythonState(call.layer, (call.args, call.kwargs), named=True)
        self.tensors = TensorAttributes(self.python, self.buffers.ids)
        self._fp8 = Fp8State(call.layer)
        self._call, self._generators = call, OtherGenerators.of(call.layer, self.python)

    def why_not_written(self, t: Tensor) -> str:
        """Return why the layer must not write into a tensor that was there before; empty if it can be undone."""
        call = self._call
        return why_not_written(call.layer, call.name, (call.args, call.kwargs), self.python, self.buffers.ids, t)

    def first_written(self) -> str:
        """Return the name of something that the layer has written; empty if there is nothing."""
        buffers = (f"its buffer {name}" for name in self.buffers.changed())
        return self.python.first_written() or next(buffers, self.tensors.changed())

    def restore(self) -> None:
        """Undo what has changed."""
        self.buffers.restore(self.buffers.changed())
        self.python.restore()
        self.tensors.restore()
        self._fp8.restore()
        self.restore_random()

    def restore_random(self) -> None:
        """Let the layer draw the same random numbers again."""
        self.rng.restore()
        self._generators.restore()


class TensorAttributes:
    """Copies of the small tensors among the attributes of a layer, by which they can be restored.

    Args:
        state: The attributes of the layer.
        buffers: Ids of the layer's buffers, whose values others restore.
    """

    @torch.no_grad()
    def __init__(self, state: PythonState, buffers: Collection[int]) -> None:
        found = {id(t): (name_of(owner, key), t) for owner, key, t in restorable(state.tensors) if id(t) not in buffers}
        self._copies = [(name, t, t.detach().clone()) for name, t in found.values()]

    def changed(self) -> str:
        """Return the name of the first attribute whose values have changed; empty if there is none."""
        return next((name for name, t, copy in self._copies if not same_bytes(t, copy)), "")

    def restore(self) -> None:
        """Undo what has changed."""
        for _, t, copy in self._copies:
            if t.shape != copy.shape or t.dtype != copy.dtype:
                t.data = copy.clone()
            elif not same_bytes(t, copy):
                t.data.copy_(copy)  # `data`, so that a graph that has saved the tensor does not see a change


def restorable(tensors: Iterable[HeldTensor]) -> list[HeldTensor]:
    """Return those tensors among the attributes of a layer that a recomputation can replace by copies."""
    return [
        (owner, key, t)
        for owner, key, t in tensors
        if type(t) is Tensor and isinstance(owner, nn.Module) and not t.requires_grad and not t.is_inference()
        and t.layout is torch.strided and t.numel() <= MOST_COPIED
    ]  # fmt: skip


def why_not_written(
    layer: nn.Module, name: str, arguments: Any, state: PythonState, buffers: Collection[int], t: Tensor
) -> str:
    """Return why a layer must not write into a tensor that was there before; empty if it can be undone.

    Args:
        layer: The layer.
        name: Its name, for messages.
        arguments: Its arguments.
        state: Its attributes.
        buffers: Ids of its buffers among them, which are restored in place. While it is probed, others replace them.
        t: The tensor, or a view of it.
    """

    def shared(other: Any) -> bool:
        return isinstance(other, Tensor) and any(address_of(part) == address_of(t) for part in plain_parts(other))

    held = [each for each in state.tensors if shared(each[2])]
    what, remedy = "a tensor outside of its modules and arguments", "register it as a buffer of the layer"
    if path := next((path for path, weight in layer.named_parameters() if shared(weight)), ""):
        what = f"its weight {path}"
        remedy = "compute with a changed copy, or change weights between steps, for example in on_train_batch_start"
    elif _can_be_undone(held, buffers):
        return ""
    elif any(map(shared, tree_leaves(arguments))):
        what, remedy = "a tensor that it gets as an argument", "write into a copy, and return it"
    elif held:
        what = f"{name_of(*held[0][:2])}, which is no buffer"
    return f"{name} writes into {what}, and a recomputation would write again: {remedy}"


def _can_be_undone(held: Collection[HeldTensor], buffers: Collection[int]) -> bool:
    """Return whether what is written into a storage can be undone.

    Args:
        held: The tensors with this storage among the attributes of a layer.
        buffers: Ids of the layer's buffers.
    """
    found = {id(t): t for _, _, t in held}
    if found.keys() <= set(buffers):
        return bool(found)
    # A recomputation replaces other tensors by copies, which share nothing with each other.
    replaced = restorable(held)
    return len(found) == 1 and len(replaced) == len(held) and _is_whole(replaced[0][2])


def _is_whole(t: Tensor) -> bool:
    """Return whether a tensor is all of its storage."""
    return t.nbytes == t.untyped_storage().nbytes()
