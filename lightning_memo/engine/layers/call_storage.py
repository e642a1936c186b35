"""Where the tensors that a layer call and its slices save are stored: in offload groups, or as copies on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from lightning_memo.artifacts.compressed_layout import compressed_bytes
from lightning_memo.artifacts.swap_plan import SlotSize
from lightning_memo.artifacts.tensor_kind_costs import Place
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.layers.call_meter import CallMeter
from lightning_memo.engine.memory.checksums import TensorLabel
from lightning_memo.engine.memory.resident_tensors import ResidentTensors
from lightning_memo.engine.memory.slot import SlotView
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.saved_tensors.call_arguments import CallArguments
from lightning_memo.engine.saved_tensors.compression import Compression, SavingFunction
from lightning_memo.engine.saved_tensors.offload_group import Handle, OffloadGroup, OffloadGroups
from lightning_memo.engine.saved_tensors.wrapper_subclasses import WrappedHandle, is_opaque, is_wrapped
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.planner.token_slices import TokenRange


@dataclass(frozen=True, slots=True)
class StoragePolicy:
    """How a plan stores what a layer call saves.

    Attributes:
        memory: The memory in which slots are leased; `None` if the plan swaps nothing.
        swap: Whether slots leave the device.
        per_slice: Whether every slice has a slot of its own, and attention reads earlier keys and values from the host;
            otherwise the call has one slot.
        size: Size of the call's slot; `None` for the largest.
        states_on_host: Whether hidden states between layers, and their gradients, are on the host.
        compresses: Whether tensors are compressed in slots where that is possible (`swap_precision`).
    """

    memory: SlotMemory | None
    swap: bool
    per_slice: bool = False
    size: SlotSize | None = None
    states_on_host: bool = False
    compresses: bool = False


class CallStorage:
    """Stores the tensors that a layer call saves.

    Args:
        groups: Opens offload groups.
        policy: How the plan stores tensors.
        meter: Reports what is stored, and knows the position of the call.
        call: The layer and its arguments.
        x: The layer's input, a copy of which is stored. It must not live until the backward itself.
        first: The first slice. If slices name a place for each kind of tensor, each stores its part of the input.

    Attributes:
        memory: The memory in which slots are leased.
        group: The offload group of the call; `None` if every slice has one of its own.
        resident: Tensors that stay on the device by plan.
    """

    def __init__(
        self,
        groups: OffloadGroups,
        policy: StoragePolicy,
        meter: CallMeter,
        call: LayerCall,
        x: Tensor,
        first: TokenRange,
    ) -> None:
        self._groups, self._policy, self._meter, self._tokens = groups, policy, meter, call.tokens
        self._first, self._layer = first, call.layer
        by_kind = first.places is not None
        self._spills_all = policy.size is not None and policy.size.disk_bytes > 0 and not by_kind
        self.memory = policy.memory
        self.group = None if policy.per_slice else groups.open(policy.memory, policy.swap, policy.size)
        self.resident = ResidentTensors()
        self._input: Handle | None = None
        if self.group is not None and not by_kind:
            self._input = self.store_copy(self.group, "input", local_part(x.detach()))

    @property
    def per_slice(self) -> bool:
        """Whether every slice has an offload group of its own."""
        return self._policy.per_slice

    def compression(self, part: TokenRange, x: Tensor) -> Compression | None:
        """Return what decides which tensors of a slice are compressed; `None` if none is.

        Args:
            part: The slice.
            x: The slice's input.
        """
        return Compression(self._layer, local_part(x), part.tokens) if self._policy.compresses else None

    def store(
        self,
        group: OffloadGroup,
        kind: str,
        t: Tensor,
        place: Place | None = "swap",
        part: TokenRange | None = None,
        by_autograd: bool = False,
        compress: bool = False,
    ) -> Handle:
        """Store a tensor in a group, or on the device.

        Args:
            group: The group.
            kind: The kind of tensor, as in :class:`~lightning_memo.planner.token_slices.SavedBytes`.
            t: The tensor.
            place: Where tensors of the kind are stored.
            part: The slice whose tensor it is; `None` if it is a tensor of all tokens of the call.
            by_autograd: Whether autograd saves it, so that nothing may overwrite it before the backward.
            compress: Whether it is compressed if it is stored in the group.
        """
        profile = self._meter.profile
        if profile is not None:  # which has the sizes of the first slice
            size_bytes = t.nbytes if part is not None else -(-t.nbytes * self._first.tokens // self._tokens)
            profile.saved(self._meter.position.layer, kind, size_bytes)
        if place == "keep":
            return self.resident.keep(t) if by_autograd else self.resident.put(t)
        handle = group.put(t, self._spills_all or place == "spill", compress)
        if group.checks is not None:
            group.checks.note(handle, self.label(kind, part))
        return handle

    def store_copy(
        self, group: OffloadGroup, kind: str, t: Tensor, place: Place | None = "swap", part: TokenRange | None = None
    ) -> Handle:
        """Store a tensor that the layer may overwrite later: it is copied even if it finds no room in the slot."""
        handle = self.store(group, kind, t, place, part)
        return t.clone() if handle is t else handle

    def label(self, kind: str, part: TokenRange | None = None) -> TensorLabel:
        """Name a tensor of the call, or of one of its slices, for messages."""
        start, stop = (0, self._tokens) if part is None else (part.start, part.stop)
        position = self._meter.position
        return TensorLabel(kind, position.layer, position.first_token + start, position.first_token + stop)

    def open(self, part: TokenRange, x: Tensor) -> tuple[OffloadGroup, Handle]:
        """Return the group of a slice, and the handle of its input (or of the layer's) in it.

        Args:
            part: The slice.
            x: The slice's input.
        """
        if self.group is not None and self._input is not None:
            return self.group, self._input
        group = self.group or self._groups.open(self._policy.memory, self._policy.swap)
        return group, self.store_copy(group, "input", local_part(x.detach()), part.place("input"), part)

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
        self._compression = call.compression(part, x)
        self.products: dict[str, Handle] = {}

    @property
    def saving(self) -> SavingFunction | None:
        """Has to be entered while the slice's forward runs, if anything is compressed; `None` if nothing is."""
        return None if self._compression is None else self._compression.saving

    def find(self, t: Tensor) -> Handle | None:
        """Return the handle of a tensor whose bytes are stored already, as exact as needed; `None` if they are not."""
        known = self.group.find(t)
        if known is None:
            return self._call.resident.find(t)
        compressed = isinstance(known, SlotView) and known.compressed
        return None if compressed and self.swapped_bytes(t) is None else known

    def store(self, kind: str, t: Tensor, by_autograd: bool = False, compress: bool = False) -> Handle:
        """Store a tensor where the slice's tensors of its kind are stored."""
        place = self._range.place(kind)
        return self._call.store(self.group, kind, t.detach(), place, self._range, by_autograd, compress)

    def store_once(self, kind: str, t: Tensor) -> Handle:
        """Store a tensor as it is unless its bytes are stored already."""
        known = self.find(t)
        return known if known is not None else self.store(kind, t)

    def store_parts(self, t: Tensor) -> WrappedHandle:
        """Store the parts of a tensor that is made of other tensors."""
        return WrappedHandle.of(t, lambda part: self.store_parts(part) if is_wrapped(part) else self._store_part(part))

    def _store_part(self, part: Tensor) -> Handle:
        """Store a part of a tensor: parts may be other tensors' bytes, or weights' (views of quantised ones)."""
        known = self.find(part) if part.numel() else None
        return known if known is not None else part if part in self._arguments else self._store_other(part)

    def swapped_bytes(self, t: Tensor) -> int | None:
        """Return the bytes of a tensor in a slot if `store_other` compresses it there; `None` if it does not."""
        compresses = self._compression is not None and self._compression.covers(t)
        return compressed_bytes(t.numel(), t.itemsize) if compresses else None

    def store_other(self, t: Tensor) -> Handle:
        """Store a tensor that is no input, no output and no operand of attention."""
        return self._store_other(t, compress=self.swapped_bytes(t) is not None)

    def _store_other(self, t: Tensor, compress: bool = False) -> Handle:
        return t.detach() if is_opaque(t) else self.store("other", t, by_autograd=True, compress=compress)

    def store_state(self, state: Tensor, planned: bool) -> Handle:
        """Store the state at the start of the slice, which nothing changes.

        Args:
            state: The state.
            planned: Whether the slot has room for it; otherwise it stays on the device.
        """
        if not planned:
            return self._call.resident.put(state.detach())
        place = None if self._range.places is None else "keep"
        return self._call.store(self.group, "state", state.detach(), place, self._range)

    def product(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a matrix product, or a sum of several, and store its output if the plan has a place for it."""
        out = compute()
        place = self._range.place(name)
        if place is not None and out.is_contiguous():
            self.products[name] = self._call.store_copy(self.group, name, out.detach(), place, self._range)
        return out

    term = sum = product  # what the plan does not name is computed

    def load(self, handle: Handle) -> Tensor:
        """Return a stored tensor on the device, in the backward."""
        if not isinstance(handle, Tensor):
            self._begin_backward()
        return self.group.load(handle)

    def end_forward(self) -> None:
        """Start moving what the slice has stored off the device; further slices of the call may share the group."""
        if self._call.per_slice:
            self.group.end_forward()
        elif self._range.places is None:
            self.group.offload()

    def end_backward(self) -> None:
        """Give back the memory that is the slice's own. The graph, which refers to it, may outlive the backward."""
        self.products, self.input = {}, None
        if self._call.per_slice:
            self.group.release()
