"""Constants that a layer makes once and keeps, for example in a global dict, if it first makes them in a trial run.

Slopes of ALiBi, inverse frequencies and masks often live in a cache that many layers share. Fake tensors in it would be
of no use to any later forward. How constants are made is therefore noted, and what is still alive after a trial run is
made again, with values. All others take no memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from lightning_memo.engine.saved_tensors.side_effects import LIFTS, address_of
from lightning_memo.utils.operator_values import tensors_in

_MOST = 2**22  # entries of a constant


@dataclass(frozen=True, slots=True)
class _View:
    """Stands for a fake tensor: a view of a storage."""

    address: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, t: Tensor) -> _View:
        return cls(address_of(t), t.dtype, t.shape, t.stride(), t.storage_offset())

    def take(self, whole: Tensor) -> Tensor:
        """Return this view of the storage of another tensor."""
        empty = torch.empty(0, dtype=self.dtype, device=whole.device)
        return empty.set_(whole.untyped_storage(), self.offset, self.shape, self.stride)


class _Made(NamedTuple):
    """An operation that made or changed constants."""

    func: Any
    arguments: Any
    views: list[_View]


class KeptConstants:
    """Knows how fake tensors were made that depend on no input and on no weight."""

    def __init__(self) -> None:
        self._made: list[_Made] = []
        self._given: dict[int, Tensor] = {}  # what stands for a tensor with values, by address
        self._known: set[int] = set()

    def give(self, fake: Tensor, real: Tensor) -> None:
        """Note that a fake tensor stands for a tensor whose values do not change, for example a buffer."""
        plain = type(real) is Tensor and not real.requires_grad and real.layout is torch.strided
        if plain and real.numel() <= _MOST and real.stride() == fake.stride():
            self._given[address_of(fake)] = real

    def forget(self, t: Tensor) -> None:
        """Note that the values of a tensor are not known."""
        self._known.discard(address_of(t))

    def note(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outs: Sequence[FakeTensor],
        given: Sequence[Tensor],
        written: Sequence[Tensor],
    ) -> None:
        """Note an operation and its results, if all that it reads is known.

        Args:
            func: The operator.
            args: Its arguments by place.
            kwargs: Its arguments by name.
            outs: The fake tensors that it returned.
            given: The tensors among its arguments.
            written: Those that it wrote into.
        """
        drawn = torch.Tag.nondeterministic_seeded in func.tags
        known = func in LIFTS or all(isinstance(t, FakeTensor) and t in self for t in given)
        known = known and not any(address_of(t) in self._given for t in written)
        if outs and known and not drawn and all(t.numel() <= _MOST for t in outs):
            views = [_View.of(t) for t in outs]
            self._made.append(_Made(func, tree_map_only(FakeTensor, _View.of, (args, kwargs)), views))
            self._known.update(view.address for view in views)
        else:  # something else may now be in it
            self._known.difference_update(map(address_of, written))

    def __contains__(self, t: Tensor) -> bool:
        return address_of(t) in self._known or address_of(t) in self._given

    @torch.no_grad()
    def give_values(self, kept: Collection[Tensor]) -> None:
        """Give constants their values. Those of one storage share one again."""
        with _disable_current_modes():
            storages = self._storages({address_of(t) for t in kept})
            values = [_View.of(t).take(storages[address_of(t)]) for t in kept]
        for t, real in zip(kept, values, strict=True):
            # Whatever refers to the tensor is not known, so that the tensor itself becomes the other one.
            vars(t).clear()
            t.__class__ = Tensor
            torch._C._swap_tensor_impl(t, real)  # type: ignore[attr-defined]

    def _storages(self, wanted: set[int]) -> dict[int, Tensor]:
        """Return tensors with the storages at these addresses, by address."""
        needed: list[_Made] = []
        for made in reversed(self._made):
            if not wanted.isdisjoint(view.address for view in made.views):
                needed.append(made)
                wanted |= {leaf.address for leaf in _views_in(made.arguments)}
        storages = dict(self._given)
        for made in reversed(needed):
            args, kwargs = tree_map_only(_View, lambda view: view.take(storages[view.address]), made.arguments)
            values = tensors_in(made.func(*args, **kwargs))
            for view, value in zip(made.views, values, strict=True):
                assert (view.stride, view.offset) == (value.stride(), value.storage_offset()), made.func
                storages.setdefault(view.address, value)
        return storages


def _views_in(arguments: Any) -> list[_View]:
    found: list[_View] = []
    tree_map_only(_View, found.append, arguments)
    return found
