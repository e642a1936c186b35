"""Where the tensors that a layer call and its slices save are stored: in offload groups, or as copies on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_memo.artifacts.costs import Place
from lightning_memo.engine.layers.call_meter import CallMeter
from lightning_memo.engine.memory.saved_storages import NotedTensor, Registry, flat, gapless_strides, is_dense
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.saved_tensors.call_arguments import CallArguments
from lightning_memo.engine.saved_tensors.offload_group import Handle, OffloadGroup, OffloadGroups
from lightning_memo.engine.saved_tensors.wrapper_subclasses import WrappedHandle, is_opaque, is_wrapped
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.planner.token_slices import TokenRange


class ResidentTensors:
    """A layer call's resident tensors, without gaps, each byte once.

    Most are copies, like swapped tensors, for two reasons: a layer may overwrite its input or the output of a matrix
    product, and a view of a tensor would keep the complete storage alive.

    Attributes:
        size_bytes: Total size of the tensors.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self._registry: Registry[NotedTensor | Tensor] = Registry()

    def put(self, t: Tensor) -> Tensor:
        """Copy a tensor and return the copy."""
        if is_dense(t):
            copy = torch.as_strided(flat(t).clone(), t.shape, t.stride())
        else:
            copy = torch.empty_strided(t.shape, gapless_strides(t.shape, t), dtype=t.dtype, device=t.device).copy_(t)
        self.size_bytes += copy.nbytes
        self._registry.add(t, copy)
        return copy

    def keep(self, t: Tensor) -> NotedTensor | Tensor:
        """Keep a tensor that nothing may overwrite, as autograd would, or a copy if `t` is a part of its storage."""
        if t.nbytes < t.untyped_storage().nbytes() or t.is_inference():
            return self.put(t)
        kept = NotedTensor.of(t)
        self.size_bytes += t.nbytes
        self._registry.add(t, kept)
        return kept

    def find(self, t: Tensor) -> NotedTensor | Tensor | None:
        """Return what stands for a tensor whose bytes are resident, or `None`."""
        known = self._registry.find(t)
        if known is None:
            return None
        resident, shift_bytes = known
        if isinstance(resident, NotedTensor):
            # The registry finds a tensor only while it is unchanged. It may be an output of the operation that saves
            # it, which would then keep itself alive.
            return NotedTensor.of(t.detach())
        if not is_dense(t):  # the registry finds such a tensor only with the same shape and strides
            return resident
        data = flat(resident).view(torch.uint8)[shift_bytes : shift_bytes + t.nbytes].view(t.dtype)
        return torch.as_strided(data, t.shape, t.stride())

    def end_forward(self) -> None:
        """End the forward: nothing more will be put or looked up."""
        self._registry.clear()


@dataclass(frozen=True, slots=True)
class StoragePolicy:
    """How a plan stores what a layer call saves.

    Attributes:
        memory: The memory in which slots are leased; `None` if the plan swaps nothing.
        swap: Whether slots leave the device.
        per_slice: Whether every slice has a slot of its own, and attention reads earlier keys and values from the host;
            otherwise the call has one slot.
        sizes: Bytes of the call's slot that go to places other than the host.
        states_on_host: Whether hidden states between layers, and their gradients, are on the host.
    """

    memory: SlotMemory | None
    swap: bool
    per_slice: bool = False
    sizes: Mapping[Place, int] | None = None
    states_on_host: bool = False


class CallStorage:
    """Stores the tensors that a layer call saves.

    Args:
        groups: Opens offload groups.
        policy: How the plan stores tensors.
        meter: Reports what is stored, and knows the position of the call.

    Attributes:
        memory: The memory in which slots are leased.
        group: The offload group of the call; `None` if every slice has one of its own.
        resident: Tensors that stay on the device by plan.
    """

    def __init__(self, groups: OffloadGroups, policy: StoragePolicy, meter: CallMeter) -> None:
        self._groups, self._policy, self._meter = groups, policy, meter
        self.memory = policy.memory
        self.group = None if policy.per_slice else groups.open(policy.memory, policy.swap, policy.sizes)
        self.resident = ResidentTensors()

    @property
    def per_slice(self) -> bool:
        """Whether every slice has an offload group of its own."""
        return self._policy.per_slice

    def store(self, group: OffloadGroup, kind: str, t: Tensor, place: Place, by_autograd: bool = False) -> Handle:
        """Store a tensor in a group, or on the device.

        Args:
            group: The group.
            kind: The kind of tensor, as in :class:`~lightning_memo.planner.token_slices.SavedBytes`.
            t: The tensor.
            place: Where tensors of the kind are stored.
            by_autograd: Whether autograd saves it, so that nothing may overwrite it before the backward.
        """
        if self._meter.profile is not None:  # which has the sizes of the first slice
            self._meter.profile.saved(self._meter.position.layer, kind, t.nbytes)
        if place == "device":
            return self.resident.keep(t) if by_autograd else self.resident.put(t)
        return group.put(t, place)

    def store_copy(self, group: OffloadGroup, kind: str, t: Tensor, place: Place | None) -> Handle:
        """Store a tensor that the layer may overwrite later: it is copied even if it finds no room in the slot."""
        handle = self.store(group, kind, t, place)
        return t.clone() if handle is t else handle

    def open(self, part: TokenRange, x: Tensor) -> tuple[OffloadGroup, Handle]:
        """Return the group of a slice, and the handle of its input in it.

        Args:
            part: The slice.
            x: The slice's input.
        """
        group = self.group or self._groups.open(self._policy.memory, self._policy.swap)
        return group, self.store_copy(group, "input", local_part(x.detach()), part.place("input"))

    def end_forward(self) -> None:
        """Nothing more is stored, and nothing is needed on the device until the backward."""
        self.resident.end_forward()
        if self.group is not None:
            self.group.end_forward()


class SliceStorage:
    """Stores the tensors that a slice saves.

    Args:
        call: Stores the tensors of the layer call.
        arguments: The layer and its arguments.
        begin_backward: Begins the backward of the layer call, before the first stored tensor is loaded.
        part: The slice.
        x: The slice's input.

    Attributes:
        group: The offload group of the slice, or of the layer call.
        input: The handle of the slice's input, or of the layer's input; `None` after the slice's backward.
        products: Handles of the outputs of matrix products that a recomputation does not compute, by name.
    """

    def __init__(
        self,
        call: CallStorage,
        arguments: CallArguments,
        begin_backward: Callable[[], None],
        part: TokenRange,
        x: Tensor,
    ) -> None:
        self._call, self._arguments, self._begin_backward, self._range = call, arguments, begin_backward, part
        self.group, self.input = call.open(part, x)
        self.products: dict[str, Handle] = {}

    def find(self, t: Tensor) -> Handle | None:
        """Return the handle of a tensor whose bytes are stored already; `None` if they are not."""
        known = self.group.find(t)
        return self._call.resident.find(t) if known is None else known

    def store(self, kind: str, t: Tensor, by_autograd: bool = False) -> Handle:
        """Store a tensor where the slice's tensors of its kind are stored."""
        place = self._range.place(kind)
        return self._call.store(self.group, kind, t.detach(), place, by_autograd)

    def store_once(self, kind: str, t: Tensor) -> Handle:
        """Store a tensor unless its bytes are stored already."""
        known = self.find(t)
        return known if known is not None else self.store(kind, t)

    def store_parts(self, t: Tensor) -> WrappedHandle:
        """Store the parts of a tensor that is made of other tensors."""
        return WrappedHandle.of(t, lambda part: self.store_parts(part) if is_wrapped(part) else self._store_part(part))

    def _store_part(self, part: Tensor) -> Handle:
        """Store a part of a tensor: parts may be other tensors' bytes, or weights' (views of quantised ones)."""
        known = self.find(part) if part.numel() else None
        return known if known is not None else part if part in self._arguments else self.store_other(part)

    def store_other(self, t: Tensor) -> Handle:
        """Store a tensor that is no input, no output and no operand of attention."""
        return t.detach() if is_opaque(t) else self.store("other", t, by_autograd=True)

    def store_state(self, state: Tensor, planned: bool) -> Handle:
        """Store the state at the start of the slice, which nothing changes.

        Args:
            state: The state.
            planned: Whether the slot has room for it; otherwise it stays on the device.
        """
        if not planned:
            return self._call.resident.put(state.detach())
        place = self._range.place("state") or "device"
        return self._call.store(self.group, "state", state.detach(), place)

    def product(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a matrix product, and store its output if the plan has a place for it."""
        out = compute()
        place = self._range.place(name)
        if place is not None and out.is_contiguous():
            self.products[name] = self._call.store_copy(self.group, name, out.detach(), place)
        return out

    adapted = product

    def load(self, handle: Handle) -> Tensor:
        """Return a stored tensor on the device, in the backward."""
        if not isinstance(handle, Tensor):
            self._begin_backward()
        return self.group.load(handle)

    def end_forward(self) -> None:
        """Start moving the slice's tensors off the device, unless further slices of the call share the group."""
        if self._call.per_slice:
            self.group.end_forward()

    def rewind(self) -> None:
        """End a backward that another one may follow."""
        if self._call.per_slice:
            self.group.rewind()

    def end_backward(self) -> None:
        """Give back the memory that is the slice's own. The graph, which refers to it, may outlive the backward."""
        self.products, self.input = {}, None
        if self._call.per_slice:
            self.group.release()
