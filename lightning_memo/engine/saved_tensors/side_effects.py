"""What a run of a layer does besides its outputs: it may write into tensors that it did not make, or keep tensors.

Layers run more than once, to be probed, compared and recomputed. What such a run writes into the layer's own buffers
and attributes is undone; other tensors must not be written, and what is kept elsewhere cannot be found again.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.memory.saved_storages import byte_range, counter_of, span
from lightning_memo.utils.operator_values import tensors_in

Result = TypeVar("Result")

_aten = torch.ops.aten
# Write the same again when they run again: layers of Gemma 3n keep a weight within bounds so.
_BOUNDS = (_aten.clamp_.default, _aten.clamp_min_.default, _aten.clamp_max_.default)
# Write running statistics, which their schemas do not say.
_BATCH_NORMS = (_aten.native_batch_norm, _aten.cudnn_batch_norm, _aten.miopen_batch_norm)
# Return their argument as a new tensor: what was made outside of operators, for example by `torch.tensor`.
LIFTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)
# Seconds. Threads let go of tensors some time after the call that they serve has returned: those in which a GPU's
# backward runs of the graph, and those of process groups of what they have sent.
_WAITS_FOR_GRAPHS = (0.01, 0.1, 1.0)
_WAITS_FOR_SENT = (*_WAITS_FOR_GRAPHS, 4.0)
SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that a call of an operator changes: those in its schema and running statistics.

    Operators that only keep values within bounds are left out.
    """
    if func in _BOUNDS:
        return []
    if isinstance(func, OpOverload) and func.overloadpacket in _BATCH_NORMS:
        running, training = args[3:5], args[5]
        return [t for t in running if t is not None and training]
    return written_in_schema(func, args, kwargs)


def written_in_schema(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator's schema says a call of it writes into."""
    if not isinstance(func, OpOverload):
        return []
    return tensors_in(*(args[n] if n < len(args) else kwargs.get(name) for n, name in _written_arguments(func)))


@functools.lru_cache(maxsize=4096)
def _written_arguments(func: OpOverload[..., Any]) -> tuple[tuple[int, str], ...]:
    """Return places and names of the arguments that an operator writes into."""
    arguments = enumerate(func._schema.arguments)
    return tuple((n, a.name) for n, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def storage_of(t: Tensor) -> UntypedStorage | None:
    """Return the storage of a tensor; `None` for one without, for example a sparse tensor."""
    try:
        return Tensor.untyped_storage(t)  # an `OffloadedTensor` has another for users
    except (NotImplementedError, RuntimeError):
        return None


def address_of(t: Tensor) -> int:
    """Return a number that only views of the same storage share while it is alive; 0 for a tensor without storage."""
    storage = storage_of(t)
    return 0 if storage is None else storage._cdata


def kept_elsewhere(name: str) -> str:
    """Return why a layer is refused that keeps tensors where no run of it can be undone."""
    return (
        f"{name} keeps tensors outside of its modules, arguments and return value (in a global list or a cache, "
        "for example), but lightning_memo runs layers more than once: return them, or keep them in attributes of its "
        "modules"
    )


def remains(holds: Callable[[], bool], sent: bool) -> bool:
    """Return whether something is held for good, and not by a thread that is about to let go of it.

    Args:
        holds: Returns whether it is held now.
        sent: Whether it may have been sent to other processes.
    """
    for seconds in _waits(sent):
        if not holds():
            return False
        time.sleep(seconds)
    return holds()


def _waits(sent: bool) -> tuple[float, ...]:
    """Return the seconds to wait between two looks: none where no such threads run."""
    if sent and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return _WAITS_FOR_SENT
    return _WAITS_FOR_GRAPHS if torch.accelerator.is_available() or threading.active_count() > 1 else ()


class KeptStorages:
    """Knows the storages that were made while something ran, without keeping their bytes."""

    def __init__(self) -> None:
        # As long as there is a weak reference, no other storage gets the address.
        self._made: dict[int, StorageWeakRef] = {}

    def __contains__(self, t: Tensor) -> bool:
        return address_of(t) in self._made

    def add(self, t: Tensor) -> None:
        """Add the storage of a tensor."""
        if (storage := storage_of(t)) is not None and storage._cdata not in self._made:
            self._made[storage._cdata] = StorageWeakRef(storage)

    def alive(self) -> set[int]:
        """Return the addresses of those that something still holds."""
        if not self._alive():
            return set()
        gc.collect()  # what only refers to itself is not kept
        return self._alive()

    def _alive(self) -> set[int]:
        return {address for address, storage in self._made.items() if not storage.expired()}


class SideEffects(TorchDispatchMode):
    """Refuses, before it happens, that a layer writes into tensors that it did not make; notes what it keeps.

    Args:
        sources: The tensors of which outputs are functions, apart from weights.
        why_not_written: Returns why a tensor that was there before must not be written; empty if it may be.
    """

    supports_higher_order_operators = True

    def __init__(self, sources: Iterable[Tensor], why_not_written: Callable[[Tensor], str]) -> None:
        super().__init__()
        self._why_not_written = why_not_written
        self._sources = {address_of(t) for t in sources}
        self._made, self._dependent = KeptStorages(), KeptStorages()
        self._why = ""
        self._paused = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what runs inside the context."""
        with _DataSets(self._check_set), self:
            yield
        self.refuse()

    def outside(self, compute: Callable[..., Result]) -> Callable[..., Result]:
        """Return a function of the package that is not watched: kernels may write into memory that they reuse."""

        @functools.wraps(compute)
        def unwatched(*args: Any, **kwargs: Any) -> Result:
            self._paused = True
            try:
                result = compute(*args, **kwargs)
            finally:
                self._paused = False
            if isinstance(result, Tensor):
                self._made.add(result)
                self._dependent.add(result)
            return result

        return unwatched

    def refuse(self) -> None:
        """Refuse what was written, also if the layer has caught the exception.

        Raises:
            ValueError: The layer writes into a tensor that must not be written.
        """
        if self._why:
            raise ValueError(self._why)

    def depends(self, t: Tensor) -> bool:
        """Return whether a tensor depends on the sources."""
        return t in self._dependent

    def keeps_tensors(self) -> bool:
        """Return whether anything that depends on the sources is still alive."""
        return remains(lambda: bool(self._dependent.alive()), sent=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        given = tensors_in(args, kwargs)
        if any(is_traceable_wrapper_subclass(t) for t in given):
            return NotImplemented  # their class takes them apart
        written = written_by(func, args, kwargs)
        for t in written:
            self._check(t)
        result = func(*args, **kwargs)
        self._note(func, given, [*written, *tensors_in(result)])
        return result

    def _note(self, func: Any, given: list[Tensor], results: list[Tensor]) -> None:
        addresses = {address_of(t) for t in given}
        depends = any(t in self._dependent for t in given) or not self._sources.isdisjoint(addresses)
        for t in results:
            if address_of(t) not in addresses or func in LIFTS:
                self._made.add(t)
            if depends and t in self._made:
                self._dependent.add(t)

    def _check(self, t: Tensor) -> None:
        if t not in self._made and (why := self._why_not_written(t)):
            self._why = self._why or why
            self.refuse()

    def _check_set(self, t: Tensor, data: Tensor) -> None:
        # Classes of libraries for weights convert their bytes when they are first used.
        if not self._paused and type(t) in (Tensor, nn.Parameter) and address_of(t) != address_of(data):
            self._check(t)


class _DataSets(TorchFunctionMode):
    """Calls a function before `t.data = data`, which is no operator."""

    def __init__(self, check: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self._check = check

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == SET_DATA:
            self._check(args[0], args[1])
        return func(*args, **(kwargs or {}))


class _Places(NamedTuple):
    """Where the values of a tensor are in its storage, in units of their size."""

    itemsize: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    stop: int

    @staticmethod
    def of(t: Tensor) -> _Places:
        start = t.storage_offset()
        return _Places(t.itemsize, tuple(t.shape), t.stride(), start, start + span(t))

    def overlap(self, other: _Places) -> bool:
        """Return whether any value is in both: the columns of a matrix share a range of bytes, but no values."""
        if self.itemsize != other.itemsize:
            return True
        taken = torch.zeros(max(self.stop, other.stop), dtype=torch.bool)
        taken.as_strided(self.size, self.stride, self.start).fill_(True)
        return bool(taken.as_strided(other.size, other.stride, other.start).any())


class _Saved(NamedTuple):
    """The bytes of a saved tensor.

    Attributes:
        storage: Its storage, which must not live longer than without this.
        start: Its first byte.
        stop: The end of its bytes.
        places: Where its values are.
        counter: A tensor without bytes that counts the changes of the saved one.
        version: The number of changes when it was saved.
    """

    storage: StorageWeakRef
    start: int
    stop: int
    places: _Places
    counter: Tensor
    version: int


class HiddenWrites(TorchDispatchMode):
    """Notes writes to saved tensors inside this context that autograd does not notice, as through `t.data`.

    Plain training then computes with the written values. A tensor that was swapped has the values that were saved.

    Args:
        call: The layer and its arguments, whose parameters, buffers and arguments are left out.

    Attributes:
        saved_bytes: Bytes of the saved tensors.
    """

    def __init__(self, call: LayerCall) -> None:
        super().__init__()
        self._name = call.name
        held = [*call.layer.parameters(), *call.layer.buffers(), *tree_leaves((call.args, call.kwargs))]
        self._held = {t.untyped_storage()._cdata for t in held if _is_plain(t)}
        self.saved_bytes = 0
        self._saved: dict[int, list[_Saved]] = {}
        self._written: list[_Saved] = []

    def note(self, t: Tensor) -> None:
        """Note that autograd saves a tensor."""
        if not _is_plain(t) or t.is_inference() or (key := t.untyped_storage()._cdata) in self._held:
            return
        storage = StorageWeakRef(t.untyped_storage())
        saved, known = _Saved(storage, *byte_range(t), _Places.of(t), counter_of(t), t._version), self._saved.get(key)
        if not known or known[-1].storage.expired():  # otherwise it is saved again, or a part of it
            self.saved_bytes += t.untyped_storage().nbytes()
        self._saved.setdefault(key, []).append(saved)

    def refuse(self) -> None:
        """Refuse writes to saved tensors that count no change.

        Raises:
            ValueError: There was one.
        """
        if any(saved.counter._version == saved.version for saved in self._written):
            raise ValueError(
                f"{self._name} writes through .data into its input, or into a tensor that autograd has saved, and what "
                "is swapped are the values before that: write into a copy (t = t.clone())"
            )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in filter(_is_plain, written_in_schema(func, args, kwargs or {})):
            start, stop = byte_range(t)
            for saved in self._saved.get(t.untyped_storage()._cdata, ()):
                near = saved.start < stop and start < saved.stop and not saved.storage.expired()
                if near and saved.places.overlap(_Places.of(t)):
                    self._written.append(saved)
        return func(*args, **kwargs or {})


def _is_plain(t: Any) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided
