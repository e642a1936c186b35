"""Where the tensors that one slice of a layer call saves are stored."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_memo.engine.layers.layer_run import LayerRun
from lightning_memo.engine.saved_tensors.offload_group import Handle
from lightning_memo.engine.saved_tensors.wrapper_subclasses import WrappedHandle, is_opaque, is_wrapped
from lightning_memo.planner.token_slices import TokenRange


class SliceStorage:
    """Stores the tensors that a slice saves.

    Args:
        run: The layer call.
        part: The slice.
        x: The slice's input.

    Attributes:
        group: The offload group of the slice, or of the layer call.
        input: The handle of the slice's input, or of the layer's input.
        products: Handles of the outputs of matrix products that a recomputation does not compute, by name.
    """

    def __init__(self, run: LayerRun, part: TokenRange, x: Tensor) -> None:
        self._run, self._range = run, part
        self.group, self.input = run.storage.open(part, x)
        self.products: dict[str, Handle] = {}

    def find(self, t: Tensor) -> Handle | None:
        """Return the handle of a tensor whose bytes are stored already; `None` if they are not."""
        known = self.group.find(t)
        return self._run.storage.resident.find(t) if known is None else known

    def store(self, kind: str, t: Tensor) -> Handle:
        """Store a tensor where the slice's tensors of its kind are stored."""
        return self._run.storage.store(self.group, kind, t.detach(), self._range.place(kind), self._range)

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
        return known if known is not None else part if part in self._run.arguments else self.store_other(part)

    def store_other(self, t: Tensor) -> Handle:
        """Store a tensor that is no input, no output and no operand of attention."""
        return t.detach() if is_opaque(t) else self.store("other", t)

    def store_product(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Compute a matrix product, and store its output if the plan has a place for it."""
        out = compute()
        place = self._range.place(name)
        if place is not None and out.is_contiguous():
            self.products[name] = self._run.storage.store_copy(self.group, name, out.detach(), place, self._range)
        return out

    def load(self, handle: Handle) -> Tensor:
        """Return a stored tensor on the device, in the backward."""
        if not isinstance(handle, Tensor):
            self._run.begin_backward()
        return self.group.load(handle)

    def end_forward(self) -> None:
        """Start moving what the slice has stored off the device; further slices of the call may share the group."""
        if self._run.storage.per_slice:
            self.group.end_forward()
        elif self._range.places is None:
            self.group.offload()

    def end_backward(self) -> None:
        """Give back the memory that is the slice's own."""
        self.products = {}
        if self._run.storage.per_slice:
            self.group.release()
