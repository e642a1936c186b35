"""Saved tensors that are no activations: weights, buffers, and arguments that all layers share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.saved_tensors.wrapper_subclasses import is_sparse, plain_parts

_LONGEST_PATH_TO_A_WEIGHT = 6  # a cast, a transpose, an index and a view, and two more


def _storages(t: Tensor) -> set[int]:
    return {part.untyped_storage()._cdata for part in plain_parts(t)}


class NonActivations:
    """Contains the saved tensors that are on the device anyway, and therefore stay where they are.

    Args:
        layer: The layer, whose parameters and buffers are contained.
        arguments: The layer's arguments apart from its input. All layers get the same ones (rotary tables, masks).
        x: The layer's input, which is an activation even if the arguments hold it, too.

    Attributes:
        frozen: Whether some weights of the layer are not trained.
    """

    def __init__(self, layer: nn.Module, arguments: Any, x: Tensor | None) -> None:
        tensors = [t for t in tree_leaves(arguments) if isinstance(t, Tensor)]
        weights = list(layer.parameters())
        self._weights: set[int] = set().union(*map(_storages, weights))
        self._storages = self._weights.union(*(_storages(t) for t in [*tensors, *layer.buffers()]))
        # `functional_call` runs a layer with functions of weights, which have no history in a recomputation.
        self._made = {w.grad_fn for w in weights if w.grad_fn is not None}
        if x is not None:
            self._storages -= _storages(x)
        self.frozen = any(not w.requires_grad for w in weights)

    @contextlib.contextmanager
    def with_copies(self, copies: Iterable[tuple[Tensor, Tensor]]) -> Iterator[None]:
        """Contain copies inside the context, if the tensors of which they are copies are contained."""
        added = set().union(*(_storages(copy) for t, copy in copies if _storages(t) <= self._storages))
        self._storages |= added
        try:
            yield
        finally:
            self._storages -= added

    def __contains__(self, t: Tensor) -> bool:
        # A sparse tensor has no storage that could be copied.
        if t.dim() == 0 or t.numel() == 0 or isinstance(t, nn.Parameter) or is_sparse(t):
            return True
        if _storages(t) <= self._storages:
            return True
        return self._is_made_of_a_weight(t)

    def _is_made_of_a_weight(self, t: Tensor) -> bool:
        """Return whether `t` is a view or an autocast copy of a weight that is trained."""
        node = t.grad_fn
        for _ in range(_LONGEST_PATH_TO_A_WEIGHT):
            # A custom function is the engine's own entry of the layer; other layers come before it, not a weight.
            if node is None or len(node.next_functions) != 1 or isinstance(node, BackwardCFunction):
                return False
            node = node.next_functions[0][0]
            if node in self._made:
                return True
            if hasattr(node, "variable"):
                return isinstance(node.variable, nn.Parameter) or _storages(node.variable) <= self._weights
        return False
