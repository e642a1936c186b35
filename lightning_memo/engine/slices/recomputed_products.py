"""Matrix products of a recomputation, which are read from storage or measured, and their sums in modules of LoRA.

See Note: [Sums of products] in `matrix_products.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.engine.forward.matrix_products import (
    KERNELS,
    AnsweredProduct,
    Compute,
    MeasuredProduct,
    Span,
    is_view,
)
from lightning_memo.engine.layers.call_storage import SliceStorage
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.saved_tensors.side_effects import address_of, written_in_schema
from lightning_memo.engine.saved_tensors.wrapper_subclasses import is_wrapped
from lightning_memo.utils.operator_values import tensors_in

# The last adapted module of a layer rarely saves more tensors: its input, the mask of dropout, and `A(x)`.
_SAVED_BY_LAST = 4
_INTO = {KERNELS[0]: torch.ops.aten.mm.out, KERNELS[1]: torch.ops.aten.addmm.out}
_ADD, _SCALE, _CAST = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten._to_copy.default
_DETACH = torch.ops.aten.detach.default  # what autograd saves is detached, and may be read later


@dataclass(slots=True)
class Term:
    """A matrix product that is a term of a sum.

    Attributes:
        name: Name of its weight in the layer.
        rows: Rows of the product.
        size_bytes: Size of the product.
        storage: Its memory, which this does not hold.
        operands: Addresses of what it is computed from, valid until that has happened.
        compute: Computes it; `None` once that has happened.
        spans: When that began and ended.
        changed: Whether the function that computes it goes on with another operation.
    """

    name: str
    rows: int
    size_bytes: int
    storage: StorageWeakRef
    operands: frozenset[int]
    compute: Callable[[], Any] | None
    spans: list[Span] = field(default_factory=list)
    changed: bool = False


class SumMode(TorchDispatchMode):
    """Runs the forward of an adapted module in a recomputation; see Note: [Sums of products].

    Args:
        stored: The sum, contiguous, if it is stored.
        now: Returns the present point in time.

    Attributes:
        terms: The products that were called, if the sum is not stored.
    """

    def __init__(self, stored: Tensor | None, now: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.terms: list[Term] = []
        self._stored, self._now = stored, now
        self._parts = set[StorageWeakRef]()  # terms and sums of them, if the sum is not stored
        # A slot holds several tensors, whose storage is the same.
        self._place = range(0) if stored is None else range(stored.data_ptr(), stored.data_ptr() + stored.nbytes)
        self._spans: list[Span] = []
        self._only_added = True
        self._called: str | None = None
        self._begun = False

    def term(self, name: str, call: Callable[[], Tensor]) -> Tensor:
        """Call the function that computes a term."""
        self._called, self._begun = name, False
        try:
            return call()
        finally:
            self._called = None

    def finish(self) -> None:
        """Compute the terms that nothing has read, outside of the mode: one of them may be the module's output."""
        with torch.no_grad():  # autograd has seen these products
            self._compute(self.terms)

    def spans_of(self, out: Tensor) -> list[Span] | None:
        """Return when the operations ran that a stored sum spares; `None` if something else reads terms.

        Args:
            out: The module's output.
        """
        if not self._only_added or not self._is_part(out) or not out.is_contiguous():
            return None
        return [*(span for term in self.terms for span in term.spans), *self._spans]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_view(func) and func is not _DETACH:
            return func(*args, **kwargs)
        if self._called is not None and func in KERNELS and not self._begun:
            return self._begin(self._called, func, args, kwargs)
        if self.terms and (written := written_in_schema(func, args, kwargs)):
            addresses = set(map(address_of, written))
            self._compute(term for term in self.terms if not addresses.isdisjoint(term.operands))
        read = [t for t in tensors_in(args, kwargs) if self._is_part(t)]
        if not read:
            return func(*args, **kwargs)
        adds = self._adds(func, args, kwargs)
        if self._stored is None:
            return self._read(func, args, kwargs, read, adds)
        if adds:
            return self._stored.view(args[0].shape)
        raise RuntimeError(
            f"the recomputation of a stored output of LoRA calls {func} with one of its terms: keep the types of the "
            "layer's input, weights and adapters alike in all steps, or give alpha, like alpha=0.5"
        )

    def _begin(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        left, right = args[-2:]
        self._begun = True
        if self._stored is not None:
            return self._stored.view(left.shape[0], right.shape[1])
        out: Tensor = left.new_empty(left.shape[0], right.shape[1])
        operands = frozenset(map(address_of, args))
        term = Term(
            name, out.shape[0], out.nbytes, _storage(out), operands, lambda: _INTO[func](*args, **kwargs, out=out)
        )
        self.terms.append(term)
        self._parts.add(term.storage)
        return out

    def _read(self, func: Any, args: Any, kwargs: Any, read: list[Tensor], adds: bool) -> Any:
        storages = {_storage(t) for t in read}
        for term in self.terms:
            if term.storage in storages:
                self._compute([term])
                term.changed |= term.name == self._called
        started = self._now()
        out = func(*args, **kwargs)
        if adds:
            self._spans.append((started, self._now()))
            self._parts.add(_storage(out))
        else:
            self._only_added = False
        return out

    def _compute(self, terms: Iterable[Term]) -> None:
        for term in terms:
            if term.compute is not None:
                started = self._now()
                term.compute()
                term.spans.append((started, self._now()))
                term.compute = None

    def _is_part(self, t: Any) -> bool:
        if not isinstance(t, Tensor) or is_wrapped(t) or t.layout is not torch.strided:
            return False
        return t.data_ptr() in self._place if self._stored is not None else _storage(t) in self._parts

    def _adds(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a term is cast or scaled by a number, or two terms are added, perhaps of two types."""
        if func is _CAST:
            return kwargs.keys() == {"dtype"}
        if kwargs or len(args) != 2:
            return False
        if func is _SCALE:
            return isinstance(args[1], (int, float))
        return func is _ADD and all(map(self._is_part, args)) and args[0].shape == args[1].shape


def _storage(t: Tensor) -> StorageWeakRef:
    return StorageWeakRef(t.untyped_storage())


class StoredMatmuls:
    """Reads products from storage, and computes those that are not there.

    Args:
        storage: Stores the tensors of the slice.
        remaining: Returns how many tensors the forward saved behind the present point.
    """

    def __init__(self, storage: SliceStorage, remaining: Callable[[], int]) -> None:
        self._storage, self._remaining = storage, remaining
        self._sum: SumMode | None = None

    def product(self, name: str, compute: Compute) -> Tensor:
        stored = self._stored(name)
        if stored is None:
            return compute()
        with AnsweredProduct(stored):
            return compute()

    def term(self, name: str, compute: Compute) -> Tensor:
        # A plan that was made while something else read terms stores products by themselves.
        if self._sum is None or self._storage.products.get(name) is not None:
            return self.product(name, compute)
        return self._sum.term(name, compute)

    def sum(self, name: str, compute: Compute) -> Tensor:
        stored, self._sum = self._stored(name), None
        if stored is None and self._remaining() > _SAVED_BY_LAST:
            return compute()  # terms of modules before the last one are read, and a mode costs time
        with SumMode(stored) as self._sum:
            out = compute()
        self._sum.finish()
        return out

    def _stored(self, name: str) -> Tensor | None:
        handle = self._storage.products.get(name)
        return None if handle is None else self._storage.load(handle)


class MeasuredProducts:
    """Notes the time of each product that a recomputation computes.

    Args:
        profile: Profile of the step.
        layer: Position of the layer call.
    """

    def __init__(self, profile: StepProfile, layer: int) -> None:
        self._profile, self._layer = profile, layer
        self._sum: SumMode | None = None

    def product(self, name: str, compute: Compute) -> Tensor:
        with MeasuredProduct(self._profile.now) as measured:
            out = compute()
        if (product := measured.out) is not None:
            self._profile.product(self._layer, name, product.shape[0], product.nbytes, [measured.span])
        return out

    def term(self, name: str, compute: Compute) -> Tensor:
        assert self._sum is not None
        return self._sum.term(name, compute)

    def sum(self, name: str, compute: Compute) -> Tensor:
        with SumMode(None, self._profile.now) as self._sum:
            out = compute()
        self._sum.finish()
        if (spans := self._sum.spans_of(out)) is not None:
            rows = out.numel() // max(out.shape[-1], 1)
            self._profile.product(self._layer, name, rows, out.nbytes, spans)
            return out
        for term in self._sum.terms:
            if not term.changed:
                self._profile.product(self._layer, term.name, term.rows, term.size_bytes, term.spans)
        return out
