"""One proof for layers that are alike, as most layers of a model are.

Note: [Attributes that differ]
Layers of one class may differ by plain attributes, for example by their position in the model. The proof for one of
them holds for another one if it uses none of the attributes that differ. In that proof they are therefore replaced by
objects that raise when they are used.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.token_locality.prove_locality import Locality, Place, prove_locality
from lightning_memo.engine.token_locality.user_code import hooked_module

_TABLES = set(vars(nn.Module()))
_MOST_PROOFS = 8  # of layers that are alike but for attributes that they use


@dataclass(frozen=True, slots=True)
class _Proof:
    """What was proven without use of the attributes in `unused`, for a layer with these attributes."""

    attributes: dict[Place, Any]
    unused: frozenset[Place]
    locality: Locality


class LocalityProofs:
    """Proves for each layer whether it keeps tokens apart, and reuses proofs."""

    def __init__(self) -> None:
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
        attributes = _attributes_of(call.layer)
        proofs = [proof for proof in self._proofs.setdefault(kind, []) if proof.attributes.keys() == attributes.keys()]
        unlike = [
            {place for place, value in attributes.items() if not _same(value, proof.attributes[place])}
            for proof in proofs
        ]
        for proof, places in zip(proofs, unlike, strict=True):
            if places <= proof.unused:
                return proof.locality
        unused: frozenset[Place] = frozenset()
        if proofs:
            n = min(range(len(proofs)), key=lambda n: len(unlike[n] - proofs[n].unused))
            unused = proofs[n].unused | unlike[n]
        locality = prove_locality(call, x, unused)
        if locality.why_not and unused:
            unused, locality = frozenset(), prove_locality(call, x)
        self._proofs[kind] = [*self._proofs[kind], _Proof(attributes, unused, locality)][-_MOST_PROOFS:]
        return locality


def _attributes_of(layer: nn.Module) -> dict[Place, Any]:
    """Return what the modules of a layer hold, apart from the values of parameters and buffers."""
    attributes: dict[Place, Any] = {}
    for path, module in layer.named_modules():
        attributes |= {(path, name): value for name, value in vars(module).items() if name not in _TABLES}
        for name, p in module._parameters.items():
            if p is not None:
                attributes[path, name] = (type(p), p.dtype, p.requires_grad)
    attributes.pop(("", "forward"), None)  # the engine's
    return attributes


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are certainly the same."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (bool, int, float, complex, str, bytes)):
        return bool(a == b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[name]) for name, value in a.items())
    if isinstance(a, FunctionType):
        cells = ([cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b))
        defaults = ((f.__defaults__, f.__kwdefaults__) for f in (a, b))
        return a.__code__ is b.__code__ and _same(*defaults) and all(map(_same, *cells))
    return False
