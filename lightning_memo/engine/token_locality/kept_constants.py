"""Constants that a layer makes once and keeps, for example in a global dict, if it first makes them in a proof.

Slopes of ALiBi, inverse frequencies and masks often live in a cache that many layers share. Fake tensors in it would be
of no use to any later forward. The values of constants are therefore computed besides, and what is still alive after a
proof gets them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

P = ParamSpec("P")
R = TypeVar("R")

_MOST = 2**22  # entries of a constant whose values are computed
_modes: ContextVar[list[ConstantsMode] | None] = ContextVar("modes_of_proof", default=None)


class ConstantsMode(FakeTensorMode):
    """Makes fake tensors of a layer's tensors, and knows the values of those that depend on no input and no weight."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._values: dict[int, tuple[StorageWeakRef, Tensor]] = {}  # by storage: a tensor with the values
        self._not_written: set[int] = set()  # storages whose values are those of the user's own tensors
        if (modes := _modes.get()) is not None:
            modes.append(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.namespace != "prim":
            self._note(func, args, kwargs or {}, result)
        return result

    def input(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Return a fake tensor that stands for an input, and is no constant."""
        with self:
            made = torch.empty(shape, dtype=like.dtype, device=like.device)
        self._values.pop(_storage_of(made), None)
        return made

    def buffer(self, t: Tensor) -> Tensor:
        """Return a fake tensor that stands for a buffer of the layer, whose values are known."""
        made = self.from_tensor(t)
        if self._is_known(t) and type(made) is FakeTensor and made.stride() == t.stride():
            storage = made.untyped_storage()
            self._values[storage._cdata] = StorageWeakRef(storage), t
            self._not_written.add(storage._cdata)
        return made

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Compute the values of an operation's results if all that it reads is known."""
        outs = [t for t in tree_leaves(result) if isinstance(t, FakeTensor)]
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        writes, drawn = func._schema.is_mutable, torch.Tag.nondeterministic_seeded in func.tags
        small = all(t.numel() <= _MOST for t in outs)
        if outs and small and not drawn and all(self._is_known(t, writes) for t in given):
            with contextlib.suppress(Exception), _disable_current_modes(), torch.no_grad():
                args, kwargs = tree_map_only(Tensor, self._value_of, (args, kwargs))
                values = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
                for t, value in zip(outs, values, strict=True):
                    self._note_value(t, value)
        elif writes:  # something else may now be in it
            for t in given:
                if isinstance(t, FakeTensor):
                    self._values.pop(_storage_of(t), None)

    def _note_value(self, t: Tensor, value: Tensor) -> None:
        if (t.stride(), t.storage_offset()) == (value.stride(), value.storage_offset()):
            storage = t.untyped_storage()
            self._values.setdefault(storage._cdata, (StorageWeakRef(storage), value))

    def _is_known(self, t: Tensor, written: bool = False) -> bool:
        """Return whether the values of a tensor are known, and it is none that must not be written to."""
        if isinstance(t, FakeTensor):
            return _storage_of(t) in self._values and not (written and _storage_of(t) in self._not_written)
        constant = type(t) is Tensor and not t.requires_grad and t.layout is torch.strided
        return constant and t.numel() <= _MOST and not written

    def _value_of(self, t: Tensor) -> Tensor:
        if not isinstance(t, FakeTensor):
            return t
        known = self._values[_storage_of(t)][1]
        whole = torch.empty(0, dtype=t.dtype, device=known.device)
        return whole.set_(known.untyped_storage(), t.storage_offset(), t.shape, t.stride())

    def fill_kept(self) -> bool:
        """Give constants that are still alive their values, and return whether there are any."""
        if all(storage.expired() for storage, _ in self._values.values()):
            return False
        gc.collect()  # what only refers to itself is not kept
        kept = [t for t in gc.get_objects() if type(t) is FakeTensor and t.fake_mode is self and self._is_known(t)]
        with torch.no_grad():
            for t in kept:
                real = self._value_of(t)
                vars(t).clear()
                t.__class__ = Tensor
                torch._C._swap_tensor_impl(t, real)
        return bool(kept)


def with_kept_constants(prove: Callable[P, R]) -> Callable[P, R]:
    """Give constants that a layer has kept in a proof their values, and prove again, because it now finds them."""

    @functools.wraps(prove)
    def proven(*args: P.args, **kwargs: P.kwargs) -> R:
        result, kept = _filled(prove, *args, **kwargs)
        return _filled(prove, *args, **kwargs)[0] if kept else result

    return proven


def _filled(prove: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> tuple[R, bool]:
    """Prove, give constants that were kept their values, and return whether there are any, too."""
    modes: list[ConstantsMode] = []
    token = _modes.set(modes)
    kept = False
    try:
        result = prove(*args, **kwargs)
    finally:
        _modes.reset(token)
        kept = sum(mode.fill_kept() for mode in modes) > 0  # all of them
    return result, kept


def _storage_of(t: Tensor) -> int | None:
    return t.untyped_storage()._cdata if t.layout is torch.strided else None
