"""What a step that is run again begins with: random states, buffers and attributes of modules."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_memo.engine.fp8_state import Fp8State
from lightning_memo.engine.saved_tensors.wrapper_subclasses import put_back
from lightning_memo.engine.state.held_state import LONGEST, MOST_KEPT, Held, HeldState
from lightning_memo.engine.state.random_states import OtherGenerators
from lightning_memo.kernels.rng_state import RngState
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.containers import copied, entries_of, size_of

_VALUES = frozenset({bool, int, float, complex, str, bytes, type(None)})
_OF_MODULES = frozenset(vars(nn.Module()))
_ABSENT = object()
_Place = tuple[nn.Module, dict[str, Any], str]
"""A module, its parameters, buffers or attributes, and a name there."""


class StepState:
    """The state from before the forward of a batch, to which the process can return.

    It holds the states of generators of random numbers, the buffers, the numbers, tensors and containers among the
    attributes of modules, and the FP8 state of TransformerEngine.

    Tensors are copied into the memory of the first batch's copies: planned buffers do not outlive a step.

    Args:
        model: The model that is trained.
        device: Where it runs.
        without: A module of the training framework, whose attributes are left out.
    """

    def __init__(self, model: nn.Module, device: torch.device, without: nn.Module | None) -> None:
        self._model, self._rng = model, RngState.capture(device)
        # Those of modules are looked for once, which takes as long as 20 later notes.
        self._generators = OtherGenerators.of(HeldState(model, ()))
        self._with_attributes, self._is_first = [m for m in model.modules() if m is not without], True
        self._copies: dict[tuple[int, str], Tensor] = {}
        self._fp8 = Fp8State(model)
        self._note_modules()

    def note(self, again: bool) -> None:
        """Take the present state in place of the earlier one.

        Args:
            again: Whether the batch is the one of the earlier state.
        """
        present = RngState.capture(self._rng.device)
        self._rng.cpu.copy_(present.cpu)
        if self._rng.accelerator is not None and present.accelerator is not None:
            self._rng.accelerator.copy_(present.accelerator)
        self._generators.note()
        self._fp8.note()
        if self._is_first and not again:  # looking at all attributes takes 0.1 ms in a small model
            changed = {id(each.module) for each in self._attributes if each.changed}
            self._with_attributes = [module for module in self._with_attributes if id(module) in changed]
            self._is_first = False
        self._note_modules()

    @torch.no_grad()
    def _note_modules(self) -> None:
        self._attributes = [_Attributes(module) for module in self._with_attributes]
        self._parameters, found = _parameters_and_untrained(self._model)
        found += [((each.module, vars(each.module), key), t) for each in self._attributes for key, t in each.tensors()]
        self._tensors = [
            _NotedTensor(*place, weakref.ref(t), t._version, self._copy_for(place, t))
            for place, t in found
            if not t.is_inference()
        ]
        pairs = [(each.copy, each.tensor()) for each in self._tensors if each.copy is not None]
        if pairs:
            torch._foreach_copy_([copy for copy, _ in pairs], [t for _, t in pairs])  # type: ignore[misc]

    def _copy_for(self, place: _Place, t: Tensor) -> Tensor | None:
        """Return memory for a copy of a small tensor; `None` if it has none."""
        module, _, key = place
        if type(t) is not Tensor or t.layout is not torch.strided or t.numel() > MOST_KEPT:
            return None
        known = self._copies.get((id(module), key))
        if known is None and self._is_first:
            known = self._copies[id(module), key] = torch.empty_like(t, requires_grad=False)
        if known is None or (known.shape, known.dtype, known.device) != (t.shape, t.dtype, t.device):
            return None
        return known

    @property
    def holds_gradients(self) -> bool:
        """Whether a parameter of the noted modules has a gradient now."""
        return any(p.grad is not None for p in self._parameters)

    def drop_gradients(self) -> None:
        """Drop the gradients of all parameters."""
        for p in self._model.parameters():
            p.grad = None

    def lost(self) -> str:
        """Return the name of a tensor that was changed since and cannot be restored; empty if there is none."""
        return next((f"{class_name(each.module)}.{each.key}" for each in self._tensors if each.is_lost), "")

    def restore(self) -> None:
        """Make this state the present one."""
        for attributes in self._attributes:
            attributes.restore()
        for each in self._tensors:
            each.restore()
        self._fp8.restore()
        self._rng.restore()
        self._generators.restore()


@dataclass(frozen=True, slots=True)
class _NotedTensor:
    """A tensor that a module holds.

    Attributes:
        module: The module.
        table: Its buffers, parameters or attributes.
        key: The name of the tensor there.
        tensor: Returns the tensor, which is not kept alive.
        version: Counts changes in place.
        copy: A copy; `None` if there is none.
    """

    module: nn.Module
    table: dict[str, Any]
    key: str
    tensor: weakref.ref[Tensor]
    version: int
    copy: Tensor | None

    @property
    def is_lost(self) -> bool:
        if self.copy is not None or self.key in self.module._non_persistent_buffers_set:  # those are caches
            return False
        t = self.tensor()
        return t is None or t._version != self.version

    @torch.no_grad()
    def restore(self) -> None:
        if self.table is self.module._parameters:  # of which there are no copies; those of FSDP2 are exchanged
            return
        t = self.tensor()
        if t is None:
            if self.copy is not None:
                self.table[self.key] = self.copy.clone()
            return
        self.table[self.key] = t
        if self.copy is not None:
            put_back(t, self.copy)


class _Attributes:
    """The numbers, tensors and containers among the attributes of a module. Tensors are not kept alive."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        own = {key: value for key, value in vars(module).items() if key not in _OF_MODULES}
        self._keys = frozenset(own)
        self._values = {key: value for key, value in own.items() if type(value) in _VALUES or _is_list(value)}
        containers = ((key, value) for key, value in self._values.items() if type(value) not in _VALUES)
        self._held = [Held(module, key, value, copied(value)) for key, value in containers]
        self._tensors = {key: (weakref.ref(t), t._version) for key, t in own.items() if _is_value(t)}

    @property
    def changed(self) -> bool:
        """Whether the module holds anything else now."""
        own = vars(self.module)
        return (
            any(own.get(key, _ABSENT) is not value for key, value in self._values.items())
            or any(held.changed for held in self._held)
            or any(_other(own.get(key), ref(), number) for key, (ref, number) in self._tensors.items())
            or any(map(_is_kept, self._added().values()))
        )

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the tensors with their names."""
        return [(key, vars(self.module)[key]) for key in self._tensors]

    def restore(self) -> None:
        """Undo what has changed, apart from tensors."""
        own = vars(self.module)
        for key, value in self._added().items():
            if _is_kept(value):
                del own[key]
        own.update(self._values)
        for held in self._held:
            if held.changed:
                held.restore()

    def _added(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self.module).items() if k not in self._keys and k not in _OF_MODULES}


def _other(present: Any, t: Tensor | None, version: int) -> bool:
    """Return whether an attribute is another tensor now, or has changed."""
    return t is None or present is not t or t._version != version


def _is_value(value: Any) -> bool:
    """Return whether an attribute is a tensor that belongs to no graph."""
    return issubclass(type(value), Tensor) and not value.requires_grad and not value.is_inference()


def _is_list(value: Any) -> bool:
    """Return whether an attribute is a short container without tensors of a graph."""
    if not issubclass(type(value), (list, dict, set, deque)) or size_of(value) > LONGEST:
        return False
    return not any(issubclass(type(each), Tensor) and each.requires_grad for each in entries_of(value))


def _is_kept(value: Any) -> bool:
    return type(value) in _VALUES or issubclass(type(value), (Tensor, list, dict, set, deque))


def _parameters_and_untrained(model: nn.Module) -> tuple[list[Tensor], list[tuple[_Place, Tensor]]]:
    """Return all parameters, and the buffers and the parameters that are not trained.

    Each step needs them, and going over `model.modules()` would take four times as long.
    """
    parameters: list[Tensor] = []
    untrained: list[tuple[_Place, Tensor]] = []
    modules = [model]
    for module in modules:  # which grow meanwhile
        if children := module._modules:
            modules += [child for child in children.values() if child is not None]
        if buffers := module._buffers:
            found = [(key, t) for key, t in buffers.items() if t is not None and not t.requires_grad]
            untrained += [((module, buffers, key), t) for key, t in found]
        for key, p in module._parameters.items():
            if p is not None:
                parameters.append(p)
                if not p.requires_grad:
                    untrained.append(((module, module._parameters, key), p))
    return parameters, untrained
