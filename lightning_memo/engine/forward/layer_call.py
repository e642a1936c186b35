"""One call of a layer: its forward and its arguments, which can be cut by token."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_memo.engine.forward.cut_tokens import cut, token_dim_of
from lightning_memo.engine.forward.intercept import LayerMode
from lightning_memo.engine.memory.offloaded_tensor import OffloadedTensor, real
from lightning_memo.parallel.batches.token_layout import Documents, TokenLayout
from lightning_memo.planner.token_slices import TokenRange
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.containers import entries_of, items_of
from lightning_memo.utils.python_objects import contents_of, dict_of, in_slots

_DEPTH = 2  # of objects within objects whose attributes are looked at


class _TheInput:
    """Stands for the hidden states among the other arguments: a layer may ask whether it gets the same tensor twice."""


THE_INPUT = _TheInput()


@dataclass(frozen=True, slots=True)
class LayerCall:
    """A layer's forward and its arguments apart from the input, which is `[batch, tokens, hidden]`.

    Attributes:
        layer: The layer.
        forward: The layer's own forward.
        args: Positional arguments after the input.
        kwargs: Keyword arguments.
        tokens: Number of tokens in the input.
        batch: Number of sequences in the input.
        token_dim: 1, or 0 for a layer that takes `[tokens, batch, hidden]` or `[tokens, hidden]`.
        shards: Number of sequence-parallel shards. The input holds the tokens of one of them, and attention sees the
            same slice of all shards.
        layout: Where the tokens of the batch are; `None` if this process holds all of them in order.
        keyword: The keyword by which the layer got its input; empty if it is the first positional argument.
        documents: Where documents start in each row, as far as states need it; `None` if rows are not packed.
    """

    layer: nn.Module
    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tokens: int
    batch: int
    token_dim: int = 1
    shards: int = 1
    layout: TokenLayout | None = None
    keyword: str = ""
    documents: Documents | None = None

    @property
    def name(self) -> str:
        """Name of the layer's class, for messages."""
        return class_name(self.layer)

    def run(self, x: Tensor, part: TokenRange) -> Any:
        """Run the layer's own forward on some of the tokens, whose input is `x`."""
        arguments = (self.args, self.kwargs)
        part_of = cut(arguments, self.tokens, part.start, part.stop, self.batch, self.token_dim, self.shards)
        # The layer may pass them to kernels of its own.
        if any(isinstance(t, OffloadedTensor) for t in tree_leaves(part_of)):
            part_of = tree_map_only(OffloadedTensor, real, part_of)
        args, kwargs = part_of  # by reference if possible: a layer may write to its arguments
        if any(t is THE_INPUT for t in (*args, *kwargs.values())):
            args = [x if t is THE_INPUT else t for t in args]
            kwargs = {name: x if t is THE_INPUT else t for name, t in kwargs.items()}
        if self.keyword:
            return self.forward(*args, **kwargs, **{self.keyword: x})
        return self.forward(x, *args, **kwargs)

    def form(self) -> tuple[object, ...]:
        """Return what two calls have in common in which a layer computes alike: all that is no value of a tensor."""
        return self.batch, self._form(self.args), self._form(self.kwargs)

    def _form(self, value: Any, depth: int = _DEPTH) -> object:
        if isinstance(value, Tensor):
            by_token = token_dim_of(value, self.tokens, self.batch, self.token_dim, self.shards)
            return value.dtype, value.dim(), by_token, value.requires_grad
        kind = type(value)
        if issubclass(kind, (tuple, list)):
            return kind, *(self._form(each, depth) for each in entries_of(value))
        if issubclass(kind, dict):
            return kind, *((name, self._form(each, depth)) for name, each in items_of(value))
        if value is None or issubclass(kind, (bool, float, complex, str, type, torch.dtype, torch.device)):
            return kind, value
        if issubclass(kind, int):
            return int, "tokens" if value == self.tokens else value
        if issubclass(kind, nn.Module):
            return kind, id(value)
        # Objects like masks behave like tensors; of others, attributes count as arguments do.
        if depth == 0 or hasattr(kind, "__torch_function__"):
            return kind
        return kind, self._form(_parts_of(value), depth - 1)

    def with_copied_containers(self) -> LayerCall:
        """Return the same call, whose layer cannot write to the caller's dicts and lists."""
        args, kwargs = _copy_containers((self.args, self.kwargs))
        return replace(self, args=args, kwargs=kwargs)

    def narrow(self, t: Tensor, part: TokenRange) -> Tensor:
        """Return the tokens of a slice, of a tensor that holds these or all tokens."""
        return t if t.shape[self.token_dim] == part.tokens else t.narrow(self.token_dim, part.start, part.tokens)

    def mode(self, part: TokenRange) -> LayerMode:
        """Return the mode in which the layer runs on some of the tokens."""
        return LayerMode(self.tokens, part.start, part.stop, self.batch, self.token_dim, self.shards)


def _parts_of(value: Any) -> object:
    """Return what an object or a function consists of, as far as it may decide what a layer computes."""
    kind, attributes = type(value), dict_of(value)
    if kind in (slice, range):
        return value.start, value.stop, value.step
    if issubclass(kind, functools.partial):
        return value.func, value.args, value.keywords
    if kind is MethodType:
        return value.__func__, value.__self__
    if kind is FunctionType:
        return id(value.__code__), value.__defaults__, contents_of(value)
    if callable(value) and attributes is None:
        return id(value)  # a function that is not written in Python
    return in_slots(value) | (attributes or {})


def _copy_containers(tree: Any) -> Any:
    """Return arguments in which every dict and list is another one, which holds the same."""
    if type(tree) in (dict, list):
        values = tree.items() if isinstance(tree, dict) else enumerate(tree)
        copied = {name: _copy_containers(value) for name, value in values}
        return copied if isinstance(tree, dict) else list(copied.values())
    if type(tree) is tuple:
        return tuple(map(_copy_containers, tree))
    return tree
