"""Hidden states that a model passes from layer to layer in a tuple, dict or list, with other values beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_memo.engine.forward.python_state import refill
from lightning_memo.utils.class_names import class_name

Run = Callable[..., Any]


def taken_apart(run: Run) -> Run:
    """Return a function that calls `run(layer, forward, *args, **kwargs)` with a tensor as the first of `args`.

    If the layer's first argument is a container with hidden states, the forward gets what else it holds as one more
    argument, and puts it together again.
    """

    def run_apart(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not args or isinstance(args[0], Tensor):
            return run(layer, forward, *args, **kwargs)
        leaves, spec = tree_flatten(args[0])
        place = _place_of_hidden_states(leaves)
        if place is None:
            return run(layer, forward, *args, **kwargs)
        contained = _Contained(layer, forward, spec, place)
        x = leaves.pop(place)
        output = run(layer, contained.forward, x, tuple(leaves), *args[1:], **kwargs)
        if not contained.writes:
            return output
        refill(args[0], dict(output) if isinstance(output, dict) else list(output))
        return args[0]

    return run_apart


def _place_of_hidden_states(leaves: list[Any]) -> int | None:
    """Return the place of the first tensor `[batch, tokens, hidden]`, of those with a gradient if there are any."""
    found = [n for n, t in enumerate(leaves) if isinstance(t, Tensor) and t.dim() == 3 and t.is_floating_point()]
    return next((n for n in found if leaves[n].requires_grad), next(iter(found), None))


class _Contained:
    """A layer's forward that gets hidden states and what was beside them. It lives until the backward.

    Args:
        layer: The layer.
        forward: Its own forward, which takes a container.
        spec: The form of the container.
        place: The place of the hidden states among what the container holds.

    Attributes:
        writes: Whether the layer writes into the container and returns it.
    """

    def __init__(self, layer: nn.Module, forward: Callable[..., Any], spec: TreeSpec, place: int) -> None:
        self.writes = False
        self._layer, self._forward, self._spec, self._place = layer, forward, spec, place

    def forward(self, x: Tensor, others: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        """Run the layer.

        Raises:
            ValueError: The layer writes into the container and returns something else, or writes into one inside it.
        """
        leaves = [*others[: self._place], x, *others[self._place :]]
        container = tree_unflatten(leaves, self._spec)
        output = self._forward(container, *args, **kwargs)
        now, spec = tree_flatten(container)
        if spec != self._spec or any(a is not b for a, b in zip(now, leaves, strict=True)):
            flat = isinstance(container, (dict, list)) and len(container) == spec.num_leaves
            if not (flat and output is container):
                raise ValueError(
                    f"{class_name(self._layer)} writes into the {type(container).__name__} in which it gets its hidden "
                    "states, and does not return it: let it return what it writes, in a container of its own"
                )
            self.writes = True
        return output
