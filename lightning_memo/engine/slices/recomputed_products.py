"""The matrix products of a recomputation: timed for the profile, or read from storage."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_memo.engine.forward.matrix_products import AnsweredProduct, Compute, MeasuredProduct
from lightning_memo.engine.layers.call_storage import SliceStorage
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.slices.recomputed_sums import SumMode

# The last adapted module of a layer rarely saves more tensors: its input, the mask of dropout, and `A(x)`.
_SAVED_BY_LAST = 4


class AnsweredProducts:
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
