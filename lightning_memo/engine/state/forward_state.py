"""What a layer's forward read, to which a recomputation returns, or which must not have changed since."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.engine.saved_tensors.side_effects import address_of
from lightning_memo.engine.saved_tensors.wrapper_subclasses import plain_parts
from lightning_memo.engine.state.held_values import name_of
from lightning_memo.engine.state.mutated_buffers import same_bytes
from lightning_memo.engine.state.named_values import named_values
from lightning_memo.engine.state.python_state import LONGEST, MOST_COPIED, PythonState
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.containers import Container, size_of
from lightning_memo.utils.operator_values import tensors_in

_LONGEST_REWRITTEN = 2**16  # containers of layers that write, for example lists that grow while training
_CHANGE = (
    "was changed between a forward and its backward, which recomputes activations from it: change it after the backward"
)


class _Version(NamedTuple):
    """A tensor as a forward saw it.

    Attributes:
        owner: The module, or the name of the object, that holds it.
        key: Its attribute.
        tensor: The tensor.
        number: Counts changes in place.
        storage: Address of its storage, which has others after `t.data = ...`; FSDP2 empties and fills the same one.
        copy: A copy of a small tensor; `None` for other tensors.
        rewritten: Whether the copy may differ although no change was counted.
    """

    owner: nn.Module | str
    key: str
    tensor: Tensor
    number: int
    storage: int
    copy: Tensor | None
    rewritten: bool

    @property
    def changed(self) -> bool:
        if self.tensor._version != self.number:
            return True
        if address_of(self.tensor) != self.storage:  # no change was counted
            return True
        # Only what differs is replaced: libraries tell some tensors from others by identity.
        return self.rewritten and self.copy is not None and not same_bytes(self.tensor, self.copy)


class ForwardState(PythonState):
    """What a forward of a layer reads: attributes, containers, objects, which weights are trained, versions of tensors.

    Users switch adapters, modes and attributes between a forward and its backward, for example for a second forward.

    Args:
        layer: The layer.
        arguments: Its arguments.
        restored: Ids of tensors whose values others restore.
        change: What a message says of a tensor that was changed in place since.
        most_copied: Values of the largest tensors of which a copy is kept.
        rewritten: Whether the layer may write into small tensors among its attributes, also where PyTorch does not
            count it. Layers that run in slices do not.
        named: Whether to look up what the code of the layer reads by name. Otherwise, numbers in global variables that
            were found earlier are noted.
    """

    def __init__(
        self,
        layer: nn.Module,
        arguments: Any,
        restored: Collection[int] = (),
        change: str = _CHANGE,
        most_copied: int = MOST_COPIED,
        rewritten: bool = False,
        named: bool = False,
    ) -> None:
        self._name, self._known, self._change = class_name(layer), restored, change
        self._most_copied, self._rewritten = most_copied, rewritten
        self._versions: list[_Version] = []
        self._trained: list[tuple[Tensor, bool]] = []
        super().__init__(layer, arguments, named=named)
        if not named:
            self._elsewhere += named_values(layer).present_numbers()
        self._drop_graphs()

    def _note(self, owner: nn.Module | str, key: str, container: Container) -> None:
        if size_of(container) <= (_LONGEST_REWRITTEN if self._rewritten else LONGEST):
            super()._note(owner, key, container)

    def _note_tensor(self, owner: nn.Module | str, key: str, t: Tensor) -> None:
        if t.is_leaf:
            self._trained.append((t, t.requires_grad))
        if t.is_inference() or id(t) in self._known:
            return
        small = isinstance(owner, nn.Module) and is_copied(t, self._most_copied)
        copy = t.detach().clone() if small else None
        self._versions.append(_Version(owner, key, t, t._version, address_of(t), copy, small and self._rewritten))

    def _drop_graphs(self) -> None:
        """Hold no graphs, which may be those of earlier steps. What is detached has the same version."""
        detached = {id(v.tensor): v.tensor.detach().requires_grad_() for v in self._versions if not v.tensor.is_leaf}
        if detached:
            self._replace(detached)
            self._versions = [v._replace(tensor=detached.get(id(v.tensor), v.tensor)) for v in self._versions]

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
        copies = [(v.tensor, v.copy.clone()) for v in versions if v.copy is not None]
        if copies:
            self._replace({id(t): copy for t, copy in copies})
        lost = [v for v in versions if v.copy is None]
        present = [held.present() for held in (*self._held, *self._elsewhere) if held.changed]
        added = [(table, dict(table)) for _, table in self._empty if table]
        trained = [(t, t.requires_grad) for t, _ in self._trained]
        classes = [self._classes.present(), self._other_classes.present()]
        self.restore()
        _train(self._trained)
        try:
            with _RefusedReads(self._name, lost, self._change) if lost else contextlib.nullcontext():
                yield copies
        finally:
            self.restore()  # what the recomputation has changed
            for held in (*classes, *present):
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
        versions: The tensors.
        change: What a message says of them.
    """

    def __init__(self, layer: str, versions: Collection[_Version], change: str) -> None:
        super().__init__()
        self._layer, self._change = layer, change
        self._names = {
            part.untyped_storage()._cdata: name_of(v.owner, v.key) for v in versions for part in plain_parts(v.tensor)
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for t in () if getattr(func, "is_view", False) else tensors_in(args, kwargs):
            for part in plain_parts(t):
                if (name := self._names.get(part.untyped_storage()._cdata)) is not None:
                    where = "" if name.startswith(f"{self._layer}.") else f" ({self._layer})"
                    raise RuntimeError(f"{name}{where} {self._change}")
        return func(*args, **kwargs or {})


def is_copied(t: Tensor, most_copied: int = MOST_COPIED) -> bool:
    """Return whether a recomputation can replace a tensor of a module by a copy."""
    return type(t) is Tensor and not t.is_inference() and t.numel() <= most_copied


def _train(tensors: Collection[tuple[Tensor, bool]]) -> None:
    for t, trained in tensors:
        if t.requires_grad is not trained and t.is_leaf:
            t.requires_grad_(trained)
