"""Matrix products of a recomputation, which are read from storage or measured."""

from __future__ import annotations

from torch import Tensor

from lightning_memo.engine.forward.adapted_linear import Compute
from lightning_memo.engine.forward.matrix_products import AnsweredProduct, MeasuredProduct
from lightning_memo.engine.layers.call_storage import SliceStorage
from lightning_memo.engine.layers.step_profile import StepProfile


class StoredMatmuls:
    """Reads products from storage, and computes those that are not there.

    Args:
        storage: Stores the tensors of the slice.
    """

    def __init__(self, storage: SliceStorage) -> None:
        self._storage = storage

    def product(self, name: str, compute: Compute) -> Tensor:
        stored = self._stored(name)
        if stored is None:
            return compute()
        with AnsweredProduct(stored):
            return compute()

    def adapted(self, name: str, compute: Compute) -> Tensor:
        stored = self._stored(name)
        return compute() if stored is None else stored

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

    def product(self, name: str, compute: Compute) -> Tensor:
        with MeasuredProduct(self._profile.now) as measured:
            out = compute()
        if (product := measured.out) is not None:
            self._profile.product(self._layer, name, product.shape[0], product.nbytes, [measured.span])
        return out

    def adapted(self, name: str, compute: Compute) -> Tensor:
        started = self._profile.now()
        out = compute()
        self._profile.product(self._layer, name, out.shape[0], out.nbytes, [(started, self._profile.now())])
        return out
