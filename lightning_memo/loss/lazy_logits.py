"""Logits that are computed in chunks, or in full only when an operation needs all of them.

Note: [Recorded and computed operations]
`LazyLogits` represents `pointwise(head(x))`. Functions of single logits (a soft cap, a scale, a cast) are recorded.
So are `softmax` and `log_softmax`, and products and sums of logits of the same tokens. Functions that only select or
rearrange tokens (`[:, :-1]`, `view(-1, vocabulary)`) are applied to the hidden states. `cross_entropy`, and functions
of the logits of a token (`argmax`, `gather`, `logsumexp`, `sum`, `amax`, `topk` over the vocabulary), compute one chunk
of tokens after the other. The loss of an unmodified model therefore runs in chunks, and so do losses, log-probabilities
and entropies that a user writes in the usual way. Any other operation gets real logits that are computed once, which is
correct but takes as much memory as in plain training.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from typing_extensions import Self, override

from lightning_memo.engine.forward.autocast import ambient_autocast
from lightning_memo.engine.memory.offloaded_tensor import OffloadedTensor
from lightning_memo.engine.memory.saved_storages import NotedTensor, version_of
from lightning_memo.loss.chunked_logits import (
    Pointwise,
    TokenFunction,
    normalising,
    rows_of_parts,
    token_function,
)
from lightning_memo.loss.logits_recipe import Head, HeadState, Recipe, leaves_vocabulary, parts_of
from lightning_memo.parallel.local_tensors import awaited
from lightning_memo.utils.around_forward import has_user_hooks
from lightning_memo.utils.retained_graph import first_derivative

# Names of methods of `Tensor` and of functions in `torch`.
_CASTS = ("float", "bfloat16", "half", "double", "to", "type")
_POINTWISE = ("mul", "div", "true_divide", "add", "sub", "neg", "exp", "tanh", *_CASTS)
_OF_TWO = ("mul", "add", "sub")
_COPYING = ("clone", "cpu", "cuda", "to", "tolist")
_ARRANGING = ("view", "reshape", "flatten", "contiguous", "squeeze", "unsqueeze")
_OF_GRADIENTS = (Tensor.register_hook, Tensor.retain_grad, torch.autograd.grad)
_NODE, _GET_DATA, _SET_DATA = Tensor.grad_fn.__get__, Tensor.data.__get__, Tensor.data.__set__  # type: ignore[attr-defined]
# Names of functions that need no values: attributes, shapes, and the graph.
_WITHOUT_VALUES = {
    *("__get__", "__set__", "__delete__", "size", "dim", "ndimension", "numel", "nelement", "element_size", "__len__"),
    *("stride", "storage_offset", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_inference"),
    *("_is_view", "requires_grad_", "backward"),
}


class _Family:
    """Logits that share memory in plain training.

    Attributes:
        is_real: Whether they are computed.
        is_apart: Whether values or gradients may have become others than those of the recipes: something has got their
            memory or their gradients.
        is_passed_by: Whether something was computed in chunks whose gradient passes by the logits.
    """

    def __init__(self) -> None:
        self.is_real = self.is_apart = self.is_passed_by = False

    def note(self, result: Any) -> None:
        """Note what was computed from the logits, or is computed later, without their values."""
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.requires_grad and getattr(t, "_family", None) is not self:
                self.is_passed_by = True


class _Node(torch.autograd.Function):
    """Logits in autograd's graph. The backward computes them once more.

    What is computed in chunks has a node of its own, through which the gradient passes by this one.
    """

    @staticmethod
    def forward(ctx: Any, lazy: Callable[[], LazyLogits], recipe: Recipe, x: Tensor, *trained: Tensor) -> LazyLogits:
        ctx.recipe = recipe
        return lazy()

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.recipe.gradients(gradient, ctx.needs_input_grad[2])


class LazyLogits(Tensor):
    """Logits `[..., vocabulary]` that are computed when an operation needs them; see the note above.

    For autograd they are an ordinary tensor: they have a node, and their views are views. Operations that need values
    run on an alias that has them.
    """

    @staticmethod
    def of(head: Head, x: Tensor, vocabulary: int) -> LazyLogits:
        """Return the lazy logits of a head for hidden states `[..., tokens of this shard, hidden]`."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        leading = (*x.shape[:-2], x.shape[-2] * head.shards)
        tracked = torch.is_grad_enabled()
        state = HeadState(head.module, tracked)
        recipe = Recipe(head, _kept(awaited(x), tracked), leading, (), tracked, state, ambient_autocast(device))
        return LazyLogits.by(recipe, vocabulary, dtype)

    @staticmethod
    def by(recipe: Recipe, vocabulary: int, dtype: torch.dtype) -> LazyLogits:
        """Return the lazy logits of a recipe."""
        form = torch.empty((*recipe.leading, vocabulary), dtype=dtype, device="meta")
        values = functools.partial(_values_of, recipe)
        lazy, x, trained = functools.partial(LazyLogits, form, _Family(), values, recipe), recipe.x, recipe.trained
        tracked = recipe.tracked and torch.is_grad_enabled() and (x.requires_grad or trained)
        return (_Node.apply(lazy, recipe, x, *trained) if tracked else lazy())._recorded(recipe)

    @staticmethod
    def __new__(cls, form: Tensor, family: _Family, values: Callable[[], Tensor], recipe: Recipe) -> Self:
        created = Tensor._make_wrapper_subclass(
            cls, form.shape, strides=form.stride(), storage_offset=form.storage_offset(), dtype=form.dtype,
            device=recipe.hidden.tensor.device,
        )  # fmt: skip
        torch._C._set_throw_on_mutable_data_ptr(created)  # as in `OffloadedTensor`
        return created

    def __init__(self, form: Tensor, family: _Family, values: Callable[[], Tensor], recipe: Recipe) -> None:
        """Create logits without values.

        Args:
            form: A tensor on the meta device with the same shape and strides.
            family: The logits that share memory with these.
            values: Returns the values.
            recipe: A recipe of the same hidden states.
        """
        self._form, self._family, self._read, self._recipe = form, family, functools.cache(values), recipe
        self._node: Any = NotImplemented  # that of no tensor
        self._gives_values = False

    def _recorded(self, recipe: Recipe) -> Self:
        """Note the recipe of these logits, which holds as long as they have the node that they have now."""
        self._recipe, self._node = recipe, self._without_values(_NODE, (self,))
        return self

    @property
    def _is_by_recipe(self) -> bool:
        """Whether values and gradients of these logits are those of the recipe.

        They are not after a change in place, for a leaf, and for the output of an autograd function of the user's.
        """
        with torch._C.DisableTorchFunctionSubclass():
            needs_gradient = self.requires_grad and torch.is_grad_enabled()
            # A checkpointed function must do the same in the backward, when they may be real.
            if self._family.is_apart or (self._family.is_real and not needs_gradient):
                return False
            node = self.grad_fn
            return node is self._node and not (node is None and needs_gradient)

    @property
    def hidden_states(self) -> Tensor:
        """The hidden states of which these are the logits."""
        return self._recipe.hidden.tensor

    def materialize(self) -> Tensor:
        """Return the values without history, in memory that all views share. They are computed once."""
        with torch.inference_mode(self.is_inference()), torch.no_grad():
            real = self._read()
        self._family.is_real = True
        return real

    def _become(self, values: Tensor) -> None:
        """Take other values, which are in memory of their own; see `Tensor.data`.

        Raises:
            ValueError: They have another shape or data type.
        """
        if (values.shape, values.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"logits {list(self.shape)} of {self.dtype} got data {list(values.shape)} of {values.dtype}: compute a "
                "new tensor instead"
            )
        real = values.detach()
        self._family, self._read = _Family(), lambda: real
        self._family.is_real = self._family.is_apart = True

    def _alias(self) -> Tensor:
        """Return a view that has values."""
        real = self.materialize()
        self._gives_values = True
        try:
            alias: Tensor = self._without_values(torch.ops.aten.alias, (self,))
        finally:
            self._gives_values = False
        alias.__class__ = type(real)
        return alias

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyLogits(shape={list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(DTensor, name) and self._recipe.head.parts > 1:
            return getattr(self._alias(), name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name}")

    @classmethod
    @override
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "a function compiled with torch.compile gets logits that are not computed, because the loss is "
                "computed in chunks: set loss_chunk_tokens=None"
            )
        kwargs = kwargs or {}
        if func == _SET_DATA and isinstance(args[0], LazyLogits):
            args[0]._become(args[1])
            return None
        computed = isinstance(getattr(func, "__self__", None), property)  # for example, `__cuda_array_interface__`
        needs_none = func.__name__ in _WITHOUT_VALUES and not computed
        if func in (_GET_DATA, _NODE):  # writes into data count no change, and a node may get hooks
            args[0]._family.is_apart = True
        if needs_none or (func is Tensor.register_hook and _is_of_fsdp(args[1])):
            return cls._without_values(func, args, kwargs)
        lazy = [t for t in tree_leaves((tuple(args), kwargs)) if isinstance(t, LazyLogits)]
        if func in _OF_GRADIENTS:
            lazy = [t for t in tree_leaves(args[func is torch.autograd.grad]) if isinstance(t, LazyLogits)]
            if any(t._family.is_passed_by and t._recipe.tracked for t in lazy):
                raise RuntimeError(
                    "the gradient of logits is not computed as a whole, because a loss was computed in chunks: ask for "
                    "the gradient (a hook, retain_grad) before the loss and call the model without labels, or set "
                    "loss_chunk_tokens=None"
                )
            for t in lazy:
                t._family.is_apart = True
            return cls._without_values(func, args, kwargs)
        first = args[0] if args and isinstance(args[0], LazyLogits) else None
        if first is not None and first._is_by_recipe and not has_user_hooks():
            result = first._record(func, tuple(args[1:]), kwargs)
            if result is not NotImplemented:
                for t in lazy:
                    t._family.note(result)
                return result
        return _on_aliases(func, args, kwargs, lazy)

    @staticmethod
    def _without_values(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, first = kwargs or {}, args[0] if args else None
        if isinstance(first, LazyLogits) and func.is_view and not first._gives_values:
            return first._views(lambda t: func(t, *args[1:], **kwargs))
        lazy = {id(t.materialize()): t for t in tree_leaves((args, kwargs)) if isinstance(t, LazyLogits)}
        for t in lazy.values():
            t._family.is_apart |= func._schema.is_mutable  # `set_`, which `__torch_function__` does not get
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.materialize, (args, kwargs))
        # Operations in place, and those that are given their output, return what they were given.
        return tree_map_only(Tensor, lambda t: lazy.get(id(t), t), func(*args, **kwargs))

    def _views(self, func: Callable[[Tensor], Any]) -> Any:
        """Return views that are not computed."""
        forms, structure = tree_flatten(func(self._form))
        values = self._read
        with torch.inference_mode(self.is_inference()):
            views = [
                LazyLogits(form, self._family, lambda n=n: tree_leaves(func(values()))[n], self._recipe)
                for n, form in enumerate(forms)
            ]
        return tree_unflatten(views, structure)

    # ---- operations without real logits

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.__name__
        if any(isinstance(value, torch.memory_format) for value in (*args, *kwargs.values())):
            return NotImplemented
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        if func is Tensor.detach:
            return self._view(func, (), replace(self._recipe.of(self._recipe.x.detach()), tracked=False))
        if func is Tensor.__getitem__:
            return self._choose(*args)
        if name == "argmax":
            return self._argmax(*args, **kwargs)
        if name in _OF_TWO and len(args) == 1 and not kwargs and isinstance(args[0], LazyLogits):
            return self._join(args[0], func)
        if self._recipe.head.is_whole and (sizes := rows_of_parts(name, self.shape, args, kwargs)) is not None:
            parts = self._without_values(func, (self, *args), kwargs)
            return self._divide(parts, sizes)
        if self._recipe.head.is_whole and (normalised := normalising(name, self.shape, args, kwargs)) is not None:
            return self._apply(normalised, (), cast=False)
        if self._recipe.head.is_whole and (function := token_function(name, self.shape, args, kwargs)) is not None:
            return self._values(function)
        if name in _POINTWISE:
            result = self._apply(lambda t: func(t, *args, **kwargs), (*args, *kwargs.values()), name in _CASTS)
            if result is not NotImplemented:
                return result
        if name in _ARRANGING:
            return self._arrange(lambda t: func(t, *args, **kwargs))
        if name in _COPYING and math.prod(self._recipe.leading) <= self._recipe.head.chunk_tokens:
            computed = self._with().compute()
            result = func(computed, *args, **kwargs)
            if not isinstance(result, Tensor) or not torch._C._is_alias_of(result, computed):
                return result
        return NotImplemented

    def _with(self, **changes: Any) -> Recipe:
        """Return a changed recipe, for the result of an operation on these logits."""
        return replace(self._recipe, tracked=self._recipe.tracked and torch.is_grad_enabled(), **changes)

    def _of_tokens(self, x: Tensor) -> Recipe:
        """Return the recipe of logits of the tokens with these hidden states, `[..., hidden]`."""
        return self._with(leading=tuple(x.shape[:-1])).of(x)

    def _view(self, func: Callable[..., Any], args: tuple[Any, ...], recipe: Recipe) -> LazyLogits:
        """Return a view of these logits, whose recipe is given."""
        view: LazyLogits = self._without_values(func, (self, *args))
        return view._recorded(recipe)

    def _apply(self, function: Pointwise, arguments: Sequence[Any], cast: bool) -> Any:
        if any(isinstance(argument, Tensor) for argument in arguments):
            return NotImplemented
        probe = function(torch.empty(0, dtype=self.dtype, device=self.device))
        if not isinstance(probe, Tensor) or probe.device != self.device or not probe.is_floating_point():
            return NotImplemented
        if cast and probe.dtype == self.dtype and True not in arguments:  # copy=True
            return self
        recipe = self._with(pointwise=(*self._recipe.pointwise, self._as_now(function)))
        return LazyLogits.by(recipe, self.shape[-1], probe.dtype)

    def _as_now(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs under the autocast of now, also in a backward."""
        autocast = ambient_autocast(self.device.type)

        def run(*tensors: Tensor) -> Any:
            with autocast():
                return function(*tensors)

        return run

    def _join(self, other: LazyLogits, function: Callable[[Tensor, Tensor], Tensor]) -> Any:
        joined = self._recipe.joined(other._recipe, self._as_now(function)) if self._recipe.head.is_whole else None
        if joined is None or not other._is_by_recipe:
            return NotImplemented
        return LazyLogits.by(joined, self.shape[-1], torch.promote_types(self.dtype, other.dtype))

    def _divide(self, parts: Sequence[LazyLogits], sizes: Sequence[int]) -> tuple[LazyLogits, ...]:
        """Note the recipes of parts with these numbers of rows."""
        tokens = self._recipe.tokens_first().split(list(sizes))
        return tuple(
            part._recorded(self._of_tokens(x.view(*part.shape[:-1], -1))) for part, x in zip(parts, tokens, strict=True)
        )

    def _values(self, function: TokenFunction) -> Any:
        with torch.set_grad_enabled(self._recipe.tracked and torch.is_grad_enabled()):
            values = self._recipe.values(self._as_now(function.values_of), *function.arguments)
        return function.wrap(values)

    def _arrange(self, function: Callable[[Tensor], Tensor]) -> Any:
        arranged = function(self._form)
        if arranged.dtype != self.dtype or arranged.dim() < 1 or arranged.shape[-1] != self.shape[-1]:
            return NotImplemented
        recipe = self._with(leading=tuple(arranged.shape[:-1]))
        if arranged is self._form:
            return self
        if torch._C._is_alias_of(arranged, self._form):
            return self._view(function, (), recipe)
        return LazyLogits.by(recipe, self.shape[-1], self.dtype)

    def _choose(self, index: Any) -> Any:
        recipe = self._recipe
        if recipe.head.shards > 1 or not leaves_vocabulary(index, self.dim()):
            return NotImplemented
        chosen = self._of_tokens(recipe.tokens_first()[index])
        if any(isinstance(part, Tensor) for part in parts_of(index)):
            return LazyLogits.by(chosen, self.shape[-1], self.dtype)
        return self._view(Tensor.__getitem__, (index,), chosen)

    def _cross_entropy(
        self,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        usual = weight is size_average is reduce is None and label_smoothing == 0.0 and reduction in ("mean", "sum")
        if not usual or self.dim() != 2 or target.shape != self.shape[:1] or target.is_floating_point():
            return NotImplemented
        with torch.set_grad_enabled(self._recipe.tracked and torch.is_grad_enabled()):
            loss = self._recipe.cross_entropy(target, ignore_index, reduction)
            if not torch.is_autocast_enabled(self.device.type):
                loss = loss.to(self.dtype)
            return self._recipe.head.replicated(loss)

    def _argmax(self, dim: int | None = None, keepdim: bool = False) -> Any:
        head = self._recipe.head
        if head.shards > 1 or keepdim or dim not in (-1, self.dim() - 1):
            return NotImplemented
        return self._recipe.argmax()


def _values_of(recipe: Recipe) -> Tensor:
    """Return logits in memory of their own, one after the other."""
    real = replace(recipe, tracked=False).compute()
    if real.is_contiguous() and real.storage_offset() == 0:
        return real
    return real.clone(memory_format=torch.contiguous_format)


def _on_aliases(func: Any, args: Sequence[Any], kwargs: dict[str, Any], lazy: Sequence[LazyLogits]) -> Any:
    """Call a function on aliases of lazy logits."""
    aliases = {id(t): t._alias() for t in lazy}
    versions = [version_of(alias) for alias in aliases.values()]
    args, kwargs = tree_map_only(LazyLogits, lambda t: aliases[id(t)], (tuple(args), kwargs))
    result = func(*args, **kwargs)
    for t in lazy:
        if aliases[id(t)].shape != t.shape:
            raise RuntimeError(
                f"{func.__name__} changed the shape of logits in place, which are computed in chunks: use the function "
                "that returns a view, or set loss_chunk_tokens=None"
            )
    if versions != [version_of(alias) for alias in aliases.values()] or _has_memory_of(result, aliases.values()):
        for t in lazy:
            t._family.is_apart = True
    owners = {id(aliases[id(t)]): t for t in lazy}
    return tree_map_only(Tensor, lambda t: owners.get(id(t), t), result)


def _has_memory_of(result: Any, aliases: Collection[Tensor]) -> bool:
    """Return whether a result is another tensor with the memory of one of some, as far as is known."""
    for t in tree_leaves(result):
        if isinstance(t, Tensor):
            if all(t is not alias for alias in aliases) and any(torch._C._is_alias_of(t, alias) for alias in aliases):
                return True
        elif not isinstance(t, (bool, int, float, str, type(None))):
            return True
    return False


def _kept(x: Tensor, tracked: bool) -> NotedTensor:
    """Return hidden states for logits that are computed later; see Note: [Values that are read later]."""
    if tracked or (isinstance(x, OffloadedTensor) and not x.is_real):
        return NotedTensor.of(x)
    with torch.inference_mode(False), torch.no_grad():
        return NotedTensor.of(x.clone())


def _is_of_fsdp(hook: Any) -> bool:
    """Return whether a hook is one of FSDP2, which registers it on all outputs of a module, and changes no gradient."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp.")
