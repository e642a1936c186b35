"""The arguments and weights of a layer call, of which saved tensors may be views or copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.memory.saved_storages import KeptTensor
from lightning_memo.engine.saved_tensors.non_activations import NonActivations
from lightning_memo.engine.saved_tensors.parked_arguments import ParkedView, SliceArguments
from lightning_memo.engine.saved_tensors.weight_copies import FrozenCasts, WeightCopies, WeightCopy


class CallArguments:
    """The arguments of a layer call that stay on the device until the backward is over.

    Saved tensors that are in this container are no activations: they stay where they are, or they can be made again.

    Args:
        call: The layer and its arguments.
        x: The layer's input.

    Attributes:
        call: The layer and its arguments.
    """

    def __init__(self, call: LayerCall, x: Tensor) -> None:
        self.call = call
        # As they are now, since this layer and later ones may write to them.
        self._again = call.with_copied_containers()
        self._device_type = x.device.type
        self._non_activations = NonActivations(call.layer, (call.args, call.kwargs), x)
        self._weight_copies = WeightCopies(torch.is_autocast_enabled(x.device.type))

    def __contains__(self, t: Tensor) -> bool:
        return t in self._non_activations or self._weight_copies.find_frozen(t) is not None

    def with_copies(self, copies: Iterable[tuple[Tensor, Tensor]]) -> contextlib.AbstractContextManager[None]:
        """Return a context in which copies of tensors in this container are contained."""
        return self._non_activations.with_copies(copies)

    def handle(self, t: Tensor) -> KeptTensor | ParkedView | WeightCopy:
        """Return the handle of a saved tensor that is no activation."""
        copy = self._weight_copies.find_frozen(t) or self._weight_copies.find_trained(t)
        return copy or KeptTensor.of(t)

    def load(self, handle: KeptTensor | ParkedView | WeightCopy) -> Tensor:
        """Return the tensor that a handle stands for.

        Raises:
            RuntimeError: It was changed in place since the forward.
        """
        if isinstance(handle, WeightCopy):
            return self._weight_copies.restore(handle)
        assert isinstance(handle, KeptTensor)
        return handle.unchanged(self.call.name)

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which copies of frozen weights are made such that the backward can make them again."""
        needed = self._non_activations.frozen and torch.is_autocast_enabled(self._device_type)
        return FrozenCasts(self._weight_copies) if needed else contextlib.nullcontext()

    def restored_call(self) -> LayerCall:
        """Return the call with its arguments on the device, for a recomputation."""
        # Whose tensors have to live, as saved tensors are compared with them.
        return self._again.with_copied_containers()

    def end_forward(self) -> None:
        """Drop what only the forward needs."""
        if torch.is_autocast_cache_enabled():
            torch.clear_autocast_cache()  # it holds a copy of each weight until autocast ends, which is after the loss

    def end_backward(self) -> None:
        """Drop the copies of weights that the backward made."""
        self._weight_copies.clear()


class ParkedCallArguments(CallArguments):
    """The arguments of a call for one slice of a sequence, which wait on the host between forward and backward.

    Args:
        call: The layer and its arguments.
        x: The layer's input.
        parked: The arguments that all layer calls of the slice share.
    """

    def __init__(self, call: LayerCall, x: Tensor, parked: SliceArguments) -> None:
        super().__init__(call, x)
        self._parked = parked

    def handle(self, t: Tensor) -> KeptTensor | ParkedView | WeightCopy:
        handle = super().handle(t)
        return (self._parked.view_of(t) if isinstance(handle, KeptTensor) else None) or handle

    def load(self, handle: KeptTensor | ParkedView | WeightCopy) -> Tensor:
        if not isinstance(handle, ParkedView):
            return super().load(handle)
        t: Tensor = self._parked.restore(handle)
        return t

    def restored_call(self) -> LayerCall:
        args, kwargs = self._parked.restore((self.call.args, self.call.kwargs))
        self._non_activations = NonActivations(self.call.layer, (args, kwargs), None)
        return replace(self.call, args=args, kwargs=kwargs)

    def end_forward(self) -> None:
        args, kwargs = self._parked.park((self.call.args, self.call.kwargs))
        self.call = self._again = replace(self.call, args=args, kwargs=kwargs)
