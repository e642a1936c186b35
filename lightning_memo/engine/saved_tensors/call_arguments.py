"""The arguments and weights of a layer call, of which saved tensors may be views or copies.

A single call keeps its arguments on the device. Where the model runs slice by slice, those that all layers share for
one slice (rotary tables, masks) wait on the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map

from lightning_memo.engine.copy_streams import CopyEvent
from lightning_memo.engine.forward.cut_tokens import is_shared_copy
from lightning_memo.engine.forward.intercept import OwnMode
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.forward.matrix_products import WEIGHT_PLACES
from lightning_memo.engine.memory.host import HostBuffer
from lightning_memo.engine.memory.saved_storages import NotedTensor, Registry, flat, is_dense, span
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.saved_tensors.side_effects import address_of
from lightning_memo.engine.saved_tensors.wrapper_subclasses import is_sparse, plain_parts
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.planner.token_slices import SavedBytes, TokenRange, aligned

_COPY: Final = "ToCopyBackward0"
_VIEWS: Final = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsafeViewBackward0"}


@dataclass(frozen=True, slots=True)
class WeightCopy:
    """Stands for a view of a weight's copy in another dtype.

    Attributes:
        weight: The weight.
        version: The version of the weight when the copy was made.
        address: The address of its storage at that time, which `weight.data = ...` changes.
        dtype: The dtype of the copy.
        shape: Shape of the view.
        stride: Strides of the view.
        offset: Offset in the copy, in elements.
    """

    weight: nn.Parameter
    version: int
    address: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, t: Tensor, weight: nn.Parameter | None) -> WeightCopy | None:
        """Return what makes `t` again from its weight; `None` if `t` is no plain copy of a whole weight."""
        if weight is None or t.untyped_storage().nbytes() != weight.numel() * t.element_size():
            return None
        return cls(
            weight, weight._version, address_of(local_part(weight)), t.dtype, t.shape, t.stride(), t.storage_offset()
        )


class WeightCopies:
    """Copies that the forward of a layer call makes, and that its backward makes again once.

    Args:
        autocast: Whether autocast is on around the layer. If not, copies are the layer's own.
    """

    def __init__(self, autocast: bool) -> None:
        self._autocast = autocast
        self._frozen: Registry[nn.Parameter] = Registry()
        self._made: dict[tuple[int, torch.dtype], Tensor] = {}

    def of_frozen(self, weight: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """Return a copy of a frozen weight in another dtype, which `find_frozen` recognizes."""
        copy = weight.detach().to(dtype)
        self._frozen.add(copy, weight)
        return copy

    def find_frozen(self, t: Tensor) -> WeightCopy | None:
        """Return what makes `t` again if `of_frozen` made it; `None` otherwise."""
        known = self._frozen.find(t) if type(t) is Tensor and t.numel() else None
        return None if known is None else WeightCopy.of(t, known[0])

    def find_trained(self, t: Tensor) -> WeightCopy | None:
        """Return what makes `t` again if it is autocast's copy of a trained weight; `None` otherwise.

        A user's own copy may have been changed, by `copy.data.mul_` without a trace.
        """
        if t._version or not self._autocast:
            return None
        return WeightCopy.of(t, _copied_weight(t.grad_fn))

    def restore(self, copy: WeightCopy) -> Tensor:
        """Return the tensor that a handle stands for.

        Raises:
            RuntimeError: The weight was changed after the forward.
        """
        if copy.weight._version != copy.version or address_of(local_part(copy.weight)) != copy.address:
            raise RuntimeError(
                "a weight that the backward needs was changed after the forward: step the optimizer, or load "
                "weights, before the forward or after the backward"
            )
        key = id(copy.weight), copy.dtype
        if key not in self._made:
            self._made[key] = copy.weight.detach().to(copy.dtype)
        return torch.as_strided(self._made[key], copy.shape, copy.stride, copy.offset)

    def clear(self) -> None:
        """Free all copies at the end of the backward."""
        self._frozen.clear()
        self._made.clear()


class FrozenCasts(OwnMode):
    """Casts frozen weights before autocast does; see Note: [Copies of frozen weights]."""

    def __init__(self, copies: WeightCopies) -> None:
        super().__init__()
        self._copies = copies

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        place = WEIGHT_PLACES.get(func)
        if place is not None and len(args) > place and not self.inside and _is_cast(args[place]):
            weight = args[place]
            copy = self._copies.of_frozen(weight, torch.get_autocast_dtype(weight.device.type))
            args = (*args[:place], copy, *args[place + 1 :])
        return func(*args, **(kwargs or {}))


def _is_cast(t: Any) -> bool:
    """Return whether `t` is a frozen weight that autocast is going to copy."""
    if not _is_plain(t) or t.requires_grad or not torch.is_autocast_enabled(t.device.type):
        return False
    return t.is_floating_point() and t.dtype not in (torch.float64, torch.get_autocast_dtype(t.device.type))


def _copied_weight(node: Node | None) -> nn.Parameter | None:
    """Return the weight of whose copy a tensor with this history is a view; `None` if there is none."""
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != _COPY:
        return None
    weight = getattr(node.next_functions[0][0], "variable", None)
    return weight if _is_plain(weight) else None


def _is_plain(t: Any) -> bool:
    """Return whether `t` is a plain parameter. Other types (DTensors, quantized weights) define their own copies."""
    return type(t) is nn.Parameter and type(t.data) is Tensor


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
            self._events.append(self._buffers[-1].write(flat(t).view(torch.uint8)))

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
            self._events.append(buffer.read(flat(t).view(torch.uint8)))
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
    return {Tensor.untyped_storage(part)._cdata for part in plain_parts(t)}  # that of an `OffloadedTensor` differs


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
        if _storages(t) <= self._storages or is_shared_copy(t):
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
