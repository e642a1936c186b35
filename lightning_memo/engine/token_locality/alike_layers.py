"""One proof for layers that are alike, as most layers of a model are.

Note: [Attributes that differ]
Layers of one class may differ by plain attributes, for example by their position in the model. The proof for one of
them holds for another one if it uses none of the attributes that differ. In that proof they are therefore replaced by
objects that raise when they are used. What may be compared by identity (`None`, flags, functions) and what torch takes
as it is (a `torch.Generator`) cannot be replaced so: layers that differ in it have proofs of their own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor.placement_types import Placement

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.token_locality.fake_run import Place
from lightning_memo.engine.token_locality.prove_locality import Locality, prove_locality
from lightning_memo.engine.token_locality.user_code import hooked_module
from lightning_memo.utils.containers import copied, entries_of, size_of

_TABLES = set(vars(nn.Module()))
# FSDP2's own notes on a module are objects of that module, and decide nothing that the module computes.
_NOTES = "__composable_api_state_key"
_STYLES = "lightning_memo.parallel.tensor."  # each module has an object of its own
_PLAIN = frozenset({bool, int, float, complex, str, bytes})
_CHANGING = (list, dict, set)
_REPLACEABLE = (int, float, str, tuple, list, dict)
_MOST_PROOFS = 8  # of layers that are alike but for attributes that they use


class _Weight(NamedTuple):
    """The kind of a parameter."""

    type: type
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class _Proof:
    """What was proven without use of the attributes in `unused`, for a layer with these attributes."""

    attributes: dict[Place, Any]
    unused: frozenset[Place]
    locality: Locality


class LocalityProofs:
    """Proves for each layer whether it keeps tokens apart, and reuses proofs.

    Args:
        layers: The model's layers. The first proof does without the attributes that differ among them.
    """

    def __init__(self, layers: Sequence[nn.Module] = ()) -> None:
        self._layers = layers
        self._proofs: dict[object, list[_Proof]] = {}

    def forget(self) -> None:
        """Forget all proofs."""
        self._proofs.clear()

    def of(self, call: LayerCall, x: Tensor, kind: object) -> Locality:
        """Return whether a layer computes each token by itself outside attention.

        Args:
            call: The layer and its arguments.
            x: The layer's input.
            kind: What the layer and the call have in common with others: classes of modules, shapes of parameters, and
                the form of the call.
        """
        if hooked_module(call.layer):
            return prove_locality(call, x)
        attributes = _attributes_of(call.layer) | _weights_of(call.layer)
        proofs = self._proofs.setdefault(kind, [])
        alike = [(p, unlike) for p in proofs if (unlike := _unlike(attributes, p.attributes)) is not None]
        for proof, unlike in alike:
            if unlike <= proof.unused:
                return proof.locality
        if alike:
            proof, unlike = min(alike, key=lambda each: len(each[1] - each[0].unused))
            unused = proof.unused | unlike
        else:
            unused = self._unlike_others(call.layer)
        locality = prove_locality(call, x, unused)
        if locality.why_not and unused:
            unused, locality = frozenset(), prove_locality(call, x)
        self._proofs[kind] = [*proofs, _Proof(attributes, unused, locality)][-_MOST_PROOFS:]
        return locality

    def _unlike_others(self, layer: nn.Module) -> frozenset[Place]:
        """Return the attributes of a layer that differ in other layers of its class, for example its position.

        Weights are left out: those of other layers may be sharded while this layer runs.
        """
        attributes = _attributes_of(layer)
        others = [_attributes_of(each) for each in self._layers if type(each) is type(layer) and each is not layer]
        return frozenset().union(*(_unlike(attributes, each) or () for each in others))


def _attributes_of(layer: nn.Module) -> dict[Place, Any]:
    """Return what the modules of a layer hold, apart from parameters and buffers."""
    attributes: dict[Place, Any] = {}
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            if name not in _TABLES and not name.startswith(_NOTES):
                own = type(value) is MethodType and value.__self__ is module
                # Containers as they are now: users change them in place.
                attributes[path, name] = value.__func__ if own else value.copy() if type(value) in _CHANGING else value
    attributes.pop(("", "forward"), None)  # the engine's
    return attributes


def _weights_of(layer: nn.Module) -> dict[Place, Any]:
    """Return the kinds of the parameters of a layer."""
    parameters = ((path, name, p) for path, m in layer.named_modules() for name, p in m._parameters.items())
    return {(path, name): _Weight(type(p), p.dtype, p.requires_grad) for path, name, p in parameters if p is not None}


def _unlike(a: dict[Place, Any], b: dict[Place, Any]) -> frozenset[Place] | None:
    """Return where two layers hold different values; `None` if they may differ in what no stand-in would notice.

    Only the use of a value can be noticed: not `is None`, and not what torch does with an object of its own.
    """
    if a.keys() != b.keys():
        return None
    unlike = frozenset(place for place, value in a.items() if not _same(value, b[place]))
    return unlike if all(type(a[p]) is type(b[p]) and type(a[p]) in _REPLACEABLE for p in unlike) else None


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are certainly the same."""
    if a is b:
        return True
    kind = type(a)
    if kind is not type(b):
        return False
    if kind in _PLAIN or issubclass(kind, Placement):
        return bool(a == b)
    if kind.__module__.startswith(_STYLES):
        return _same(vars(a), vars(b))
    if issubclass(kind, (tuple, list)):  # read without methods of a user's class, as in the following
        return size_of(a) == size_of(b) and all(map(_same, entries_of(a), entries_of(b)))
    if issubclass(kind, dict):
        a, b = copied(a), copied(b)
        return a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items())
    if kind is functools.partial:
        return all(map(_same, (a.func, a.args, a.keywords), (b.func, b.args, b.keywords)))
    if kind is FunctionType:
        cells = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b))
        defaults = ((f.__defaults__, f.__kwdefaults__) for f in (a, b))
        return a.__code__ is b.__code__ and _same(*defaults) and all(map(_same, *cells))
    return False
