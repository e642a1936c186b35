"""The arguments and weights of a layer call, of which saved tensors may be views or copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.memory.noted_tensors import NotedTensor
from lightning_memo.engine.saved_tensors.offloaded_arguments import OffloadedArgument, SliceArguments
from lightning_memo.engine.saved_tensors.weight_copies import FrozenCasts, WeightCopies, WeightCopy
from lightning_memo.engine.saved_tensors.wrapper_subclasses import is_sparse, plain_parts

_LONGEST_PATH_TO_A_WEIGHT = 6  # a cast, a transpose, an index and a view, and two more


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

    def handle(self, t: Tensor) -> NotedTensor | OffloadedArgument | WeightCopy:
        """Return the handle of a saved tensor that is no activation."""
        copy = self._weight_copies.find_frozen(t) or self._weight_copies.find_trained(t)
        if copy is not None:
            return copy
        # A function of a weight may be saved by the operation that computes it, which would then keep itself alive.
        return NotedTensor.of(t if t.grad_fn is None else t.detach())

    def load(self, handle: NotedTensor | OffloadedArgument | WeightCopy) -> Tensor:
        """Return the tensor that a handle stands for.

        Raises:
            RuntimeError: It was changed in place since the forward.
        """
        if isinstance(handle, WeightCopy):
            return self._weight_copies.restore(handle)
        assert isinstance(handle, NotedTensor)
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

    def handle(self, t: Tensor) -> NotedTensor | OffloadedArgument | WeightCopy:
        handle = super().handle(t)
        return (self._parked.view_of(t) if isinstance(handle, NotedTensor) else None) or handle

    def load(self, handle: NotedTensor | OffloadedArgument | WeightCopy) -> Tensor:
        if not isinstance(handle, OffloadedArgument):
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


def _storages(t: Tensor) -> set[int]:
    return {Tensor.untyped_storage(part)._cdata for part in plain_parts(t)}  # a `OffloadedTensor` has another for users


class NonActivations:
    """Contains the saved tensors that are on the device anyway, and therefore stay where they are.

    Args:
        layer: The layer, whose parameters and buffers are contained.
        arguments: The layer's arguments apart from its input. All layers get the same ones (rotary tables, masks).
        x: The layer's input, which is an activation even if the arguments hold it, too.

    Attributes:
        frozen: Whether some weights of the layer are not trained.
    """

    def __init__(self, layer: nn.Module, arguments: Any, x: Tensor | None) -> None:
        tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
        weights = list(layer.parameters())
        self._weights: set[int] = set().union(*map(_storages, weights))
        self._storages = self._weights.union(*(_storages(t) for t in [*tensors, *layer.buffers()]))
        # `functional_call` runs a layer with functions of weights, which have no history in a recomputation.
        self._made = {w.grad_fn for w in weights if w.grad_fn is not None}
        if x is not None:
            self._storages -= _storages(x)
        self.frozen = any(not w.requires_grad for w in weights)

    @contextlib.contextmanager
    def with_copies(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Contain copies inside the context, if the tensors of which they are copies are contained."""
        added = set().union(*(_storages(copy) for t, copy in copies if _storages(t) <= self._storages))
        self._storages |= added
        try:
            yield
        finally:
            self._storages -= added

    def __contains__(self, t: Tensor) -> bool:
        # A sparse tensor has no storage that could be copied.
        if t.dim() == 0 or t.numel() == 0 or isinstance(t, nn.Parameter) or is_sparse(t):
            return True
        if _storages(t) <= self._storages:
            return True
        return self._is_made_of_a_weight(t)

    def _is_made_of_a_weight(self, t: Tensor) -> bool:
        """Return whether `t` is a view or an autocast copy of a weight that is trained."""
        node = t.grad_fn
        for _ in range(_LONGEST_PATH_TO_A_WEIGHT):
            # A custom function is the engine's own entry of the layer; other layers come before it, not a weight.
            if node is None or len(node.next_functions) != 1 or isinstance(node, BackwardCFunction):
                return False
            node = node.next_functions[0][0]
            if node in self._made:
                return True
            if hasattr(node, "variable"):
                return isinstance(node.variable, nn.Parameter) or _storages(node.variable) <= self._weights
        return False
