"""Containers that a layer gets: hidden states in a tuple, dict or list, and dicts in which layers share tensors."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lightning_memo.engine.forward.collected_outputs import fields_of, is_unknown_dataclass
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.containers import refill

Run = Callable[..., Any]
Dict: TypeAlias = dict[Any, Any] | UserDict[Any, Any]
_NOTHING = object()
_READING = ("__iter__", "keys", "values", "items", "clear")


def unpack_container_arguments(run: Run) -> Run:
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


def dicts_apart(run: Run) -> Run:
    """Return a function that calls `run(layer, forward, *args, **kwargs)` with dicts that nobody else holds.

    What the layer puts into a dict, as keys and values for later layers, is returned beside its output, so that the
    parts of slices are joined. The caller's dict gets it afterwards.
    """

    def run_apart(layer: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = (*enumerate(args), *kwargs.items())
        given: dict[int | str, Dict] = {at: d for at, d in arguments if _is_dict(d)}
        if not given:
            return run(layer, forward, *args, **kwargs)
        # Plain dicts, whose tensors are found and cut like other arguments.
        args = tuple(dict(given[at]) if at in given else value for at, value in enumerate(args))
        kwargs = {at: dict(given[at]) if at in given else value for at, value in kwargs.items()}
        with_dicts = _WithDicts(forward, given)
        output = run(layer, with_dicts.forward, *args, **kwargs)
        if not isinstance(output, _Written):
            return output
        for at, values in output.values.items():
            for key in output.removed[at]:
                del given[at][key]
            for key, value in values.items():
                given[at][key] = value
        like = with_dicts.like
        return output.output if like is None else dataclasses.replace(like, **output.output)

    return run_apart


def _is_dict(value: object) -> bool:
    """Return whether an argument is a dict that is copied. Others do whatever they do when they are read."""
    kind = type(value)
    base = next((each for each in (dict, UserDict) if each in kind.__mro__), None)
    if base is dict and issubclass(kind, OrderedDict):
        base = OrderedDict
    return base is not None and all(getattr(kind, name) is getattr(base, name) for name in _READING)


class _Written(NamedTuple):
    """What a layer returns, and what it has put into dicts and removed from them, by the place of the argument.

    Attributes:
        output: What it returns; the fields of a dataclass that PyTorch does not take apart.
        values: What it has put into dicts.
        removed: The keys that it has removed.
    """

    output: Any
    values: dict[int | str, dict[Hashable, Any]]
    removed: dict[int | str, list[Hashable]]


class _WithDicts:
    """A layer's forward that gets plain dicts and returns what it writes into them. It lives until the backward.

    Args:
        forward: The layer's own forward, which gets dicts of the caller's classes.
        given: The caller's dicts by the place of the argument.

    Attributes:
        like: An object without tensors of the dataclass that the layer returns, if PyTorch does not take it apart.
    """

    def __init__(self, forward: Callable[..., Any], given: Mapping[int | str, Dict]) -> None:
        self._forward = forward
        self.like: Any = None
        # The caller's are not kept, as what others put into them would live until the backward.
        self._empty = {at: _of_the_same_class(d) for at, d in given.items()}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        before = {at: args[at] if isinstance(at, int) else kwargs[at] for at in self._empty}
        made = {at: copy.copy(self._empty[at]) for at in before}
        for at, d in made.items():
            d.update(before[at])
        output = self._forward(
            *(made.get(n, value) for n, value in enumerate(args)),
            **{name: made.get(name, value) for name, value in kwargs.items()},
        )
        values = {
            at: {key: value for key, value in d.items() if value is not before[at].get(key, _NOTHING)}
            for at, d in made.items()
        }
        removed = {at: [key for key in before[at] if key not in d] for at, d in made.items()}
        if not any((*values.values(), *removed.values())):
            return output
        if is_unknown_dataclass(output):
            self.like = copy.copy(output)
            for name in fields_of(output):
                object.__setattr__(self.like, name, None)
        return _Written(fields_of(output), values, removed)


def _of_the_same_class(container: Dict) -> Dict:
    empty = copy.copy(container)
    empty.clear()
    return empty
