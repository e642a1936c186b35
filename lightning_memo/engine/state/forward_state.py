"""What a layer's forward read, to which its recomputation returns, or which must not have changed since."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextvars import Context, copy_context
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.engine.fp8_state import ForwardFp8
from lightning_memo.engine.memory.saved_storages import version_of
from lightning_memo.engine.saved_tensors.side_effects import address_of
from lightning_memo.engine.saved_tensors.wrapper_subclasses import plain_parts, same_bytes
from lightning_memo.engine.state.held_state import HeldState, HeldTensor
from lightning_memo.engine.state.random_states import ForwardDraws, OtherGenerators
from lightning_memo.kernels import RngState
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.operator_values import tensors_in

_CHANGE = (
    "was changed between a forward and its backward, which recomputes activations from it: change it after the backward"
)


class _Version(NamedTuple):
    """A tensor as a forward saw it.

    Attributes:
        held: The tensor, and what holds it.
        number: Counts changes in place.
        storage: Address of its storage, which has others after `t.data = ...`; FSDP2 empties and fills the same one.
        copy: A copy of a small tensor, or of a buffer that the layer changes; `None` for other tensors.
        rewritten: Whether the copy may differ although no change was counted.
    """

    held: HeldTensor
    number: int
    storage: int
    copy: Tensor | None
    rewritten: bool

    @property
    def changed(self) -> bool:
        t = self.held.tensor
        if t._version != self.number or address_of(t) != self.storage:  # `data` can be set without being counted
            return True
        # Only what differs is replaced: libraries tell some tensors from others by identity.
        return self.rewritten and self.copy is not None and not same_bytes(t, self.copy)


class ForwardState(HeldState):
    """What a forward of a layer reads: what its modules and arguments hold, which weights are trained, and versions.

    Users switch adapters, modes and attributes between a forward and its backward, for example for a second forward.

    Args:
        layer: The layer.
        arguments: Its arguments.
        changing: Ids of the buffers that the layer changes, of which copies are kept whatever their sizes.
        change: What a message says of a tensor that was changed in place since.
        copies: Whether copies of small tensors are kept.
        rewritten: Whether the layer may write into small tensors among its attributes, also where PyTorch does not
            count it. Layers that run in slices do not.
    """

    def __init__(
        self,
        layer: nn.Module,
        arguments: Any,
        changing: Collection[int] = (),
        change: str = _CHANGE,
        copies: bool = True,
        rewritten: bool = False,
    ) -> None:
        self._name, self._changing, self._change = class_name(layer), changing, change
        self._copies, self._rewritten = copies, rewritten
        self._versions: list[_Version] = []
        self._trained: list[tuple[Tensor, bool]] = []
        super().__init__(layer, arguments)
        self._drop_graphs()

    def _note_tensor(self, owner: nn.Module | str, key: str, t: Tensor) -> None:
        if t.is_leaf:
            self._trained.append((t, t.requires_grad))
        if t.is_inference():
            return
        held = HeldTensor(owner, key, t)
        copied = isinstance(owner, nn.Module) and (id(t) in self._changing or (self._copies and held.is_copied))
        copy = t.detach().clone() if copied else None
        self._versions.append(_Version(held, t._version, address_of(t), copy, copied and self._rewritten))

    def _drop_graphs(self) -> None:
        """Hold no graphs, which may be those of earlier steps. What is detached has the same version."""
        tensors = [v.held.tensor for v in self._versions if not v.held.tensor.is_leaf]
        if detached := {id(t): t.detach().requires_grad_() for t in tensors}:
            self._replace(detached)
            self._versions = [
                v._replace(held=v.held._replace(tensor=detached.get(id(v.held.tensor), v.held.tensor)))
                for v in self._versions
            ]

    def _replace(self, tensors: dict[int, Tensor]) -> None:
        """Let dicts and lists get other tensors when they are restored.

        Args:
            tensors: The other tensors, by the ids of those that they replace.
        """
        for held in self._held:
            before = held.before
            items = before.items() if isinstance(before, dict) else enumerate(before)
            if isinstance(before, (dict, list, deque)):
                for key, t in [(key, t) for key, t in items if id(t) in tensors]:
                    before[key] = tensors[id(t)]

    @contextlib.contextmanager
    def replayed(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Make everything as it was inside the context, and put the present state back afterwards.

        Returns:
            The tensors that are replaced by copies, each with its copy.

        Raises:
            RuntimeError: An operation reads a tensor that was changed in place since, and of which there is no copy.
        """
        versions = [v for v in self._versions if v.changed]
        copies = [(v.held.tensor, v.copy.clone()) for v in versions if v.copy is not None]
        if copies:
            self._replace({id(t): copy for t, copy in copies})
        lost = [v.held for v in versions if v.copy is None]
        present = [held.present() for held in self._held if held.changed]
        added = [(table, dict(table)) for _, table in self._empty if table]
        trained = [(t, t.requires_grad) for t, _ in self._trained]
        self.restore()
        _train(self._trained)
        try:
            with _RefusedReads(self._name, lost, self._change) if lost else contextlib.nullcontext():
                yield copies
        finally:
            self.restore()  # what the recomputation has changed
            for held in present:
                held.restore()
            for table, values in added:
                table.update(values)
            _train(trained)
            if copies:
                self._replace({id(copy): t for t, copy in copies})


class _RefusedReads(TorchDispatchMode):
    """Refuses operations that read some tensors.

    Args:
        layer: Name of the layer's class.
        lost: The tensors.
        change: What a message says of them.
    """

    def __init__(self, layer: str, lost: Collection[HeldTensor], change: str) -> None:
        super().__init__()
        self._layer, self._change = layer, change
        self._names = {part.untyped_storage()._cdata: held.name for held in lost for part in plain_parts(held.tensor)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in () if getattr(func, "is_view", False) else tensors_in(args, kwargs):
            for part in plain_parts(t):
                if (name := self._names.get(part.untyped_storage()._cdata)) is not None:
                    where = "" if name.startswith(f"{self._layer}.") else f" ({self._layer})"
                    raise RuntimeError(f"{name}{where} {self._change}")
        return func(*args, **kwargs or {})


def _train(tensors: Collection[tuple[Tensor, bool]]) -> None:
    for t, trained in tensors:
        if t.requires_grad is not trained and t.is_leaf:
            t.requires_grad_(trained)


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """What a recomputation has to restore so that it computes the same as the forward did.

    Attributes:
        rng: The random state before the forward.
        generators: States of other generators before the forward.
        state: What the forward read apart from its inputs; `None` if nothing is recomputed.
        autocast: A factory of the autocast context that was active in the forward.
        versions: Counts of changes of the buffers before the forward; `None` if the layer runs on all tokens at once.
        fp8: The FP8 autocast and scales of the forward; `None` if the layer has none, or nothing is recomputed.
        variables: The context variables (`contextvars`) of the forward. In the backward on a GPU, which has a thread of
            its own, they would have their defaults.
    """

    rng: RngState
    generators: OtherGenerators
    state: ForwardState | None
    autocast: Callable[[], contextlib.AbstractContextManager[Any]]
    versions: BufferVersions | None
    fp8: ForwardFp8 | None = None
    variables: Context = field(default_factory=copy_context)

    @property
    def comparable(self) -> bool:
        """Whether a recomputation saves the same values as the forward."""
        return self.fp8 is None or not self.fp8.pads_scales

    def draws(self, noted: bool) -> ForwardDraws:
        """Return the random states of a slice's forward, which is about to begin.

        Args:
            noted: Whether its recomputation can be compared with it.
        """
        return ForwardDraws(self.rng, self.generators, noted)

    def restore_random(self) -> None:
        """Let the next slice draw the random numbers that the first one drew."""
        self.rng.restore()
        self.generators.restore()

    @contextlib.contextmanager
    def replayed(self, draws: ForwardDraws) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Restore the conditions and enable gradients inside the context; put the present state back afterwards.

        Args:
            draws: The random numbers that the forward has drawn.

        Returns:
            The tensors that are replaced by copies, each with its copy.
        """
        assert self.state is not None
        with (
            draws.replayed(), self.state.replayed() as copies,
            torch.enable_grad(), self.autocast(),
            contextlib.nullcontext() if self.fp8 is None else self.fp8.replayed(),
        ):  # fmt: skip
            yield copies


class BufferVersions:
    """Counts of changes of a layer's buffers, by which a write is found without copies.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer, self._noted = layer, [(name, t, version_of(t)) for name, t in layer.named_buffers()]

    def first_written(self) -> str:
        """Return the name of the first buffer that was written or replaced since; empty if there is none."""
        present = dict(self._layer.named_buffers()) if self._noted else {}
        written = (name for name, t, number in self._noted if present.get(name) is not t or version_of(t) != number)
        return next(written, "")
