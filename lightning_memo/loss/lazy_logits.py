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
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from typing_extensions import Self, override

from lightning_memo.engine.forward.autocast import ambient_autocast
from lightning_memo.engine.memory.saved_storages import counter_of
from lightning_memo.loss.chunked_cross_entropy import chunked_cross_entropy
from lightning_memo.loss.chunked_logits import Pointwise
from lightning_memo.loss.logits_recipe import Head, HeadState, Recipe, leaves_vocabulary, parts_of
from lightning_memo.loss.token_functions import TokenFunction, normalising, rows_of_parts, token_function
from lightning_memo.parallel.local_tensors import awaited, local_part

# Names of methods of `Tensor` and of functions in `torch`.
_CASTS = ("float", "bfloat16", "half", "double", "to", "type")
_POINTWISE = ("mul", "div", "true_divide", "add", "sub", "neg", "exp", "tanh", *_CASTS)
_OF_TWO = ("mul", "add", "sub")
_ARRANGING = ("view", "reshape", "flatten", "contiguous", "squeeze", "unsqueeze")
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "nbytes", "itemsize", "is_cuda", "is_cpu", "is_meta")
# What Python code sees of the graph: FSDP would register hooks on logits that require gradients.
_OF_GRAPH = {Tensor.requires_grad.__get__: False, Tensor.is_leaf.__get__: True, Tensor.grad_fn.__get__: None}
# What a hook gets, or `autograd.grad` returns, would be missing.
_OF_GRADIENTS = (Tensor.register_hook, Tensor.retain_grad, Tensor.grad.__get__, torch.autograd.grad)
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "element_size", "is_floating_point", "__len__")
_METADATA = {
    *(getattr(Tensor, name).__get__ for name in _PROPERTIES),
    *(getattr(Tensor, name) for name in _METHODS),
    *(torch.numel, torch.is_floating_point),
}


class _Family:
    """Logits that share memory in plain training: views of each other, and parts of them that were computed."""

    def __init__(self) -> None:
        self._views: list[weakref.ref[Tensor]] = []
        self._versions: list[tuple[Tensor, int]] = []

    @property
    def in_use(self) -> int:
        """Number of those that are alive and not computed."""
        return sum(view() is not None for view in self._views)

    def add(self, view: Tensor) -> None:
        """Add logits that are not computed."""
        self._views.append(weakref.ref(view))

    def add_computed(self, t: Tensor) -> None:
        """Add a part that was computed. Only its count of changes is kept."""
        local = local_part(t)
        if not local.is_inference():
            self._versions.append((counter_of(local), local._version))

    def check(self) -> None:
        """Check that no part has changed.

        Raises:
            RuntimeError: One has.
        """
        if any(counter._version != version for counter, version in self._versions):
            raise RuntimeError(
                "a part of logits was changed in place, and the others, which are computed in chunks, would not see "
                "the change: clone() them first, or set loss_chunk_tokens=None"
            )


class _PassedOn(torch.autograd.Function):
    """Gives lazy logits a graph, for functions of users that autograd calls with them and that compute a gradient.

    The backward computes the logits once more. Operations on lazy logits do not use this graph.
    """

    @staticmethod
    def forward(ctx: Any, lazy: Callable[[], LazyLogits], recipe: Recipe, x: Tensor, anchor: Tensor) -> LazyLogits:
        ctx.recipe = recipe
        return lazy()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor | None, None]:
        x = ctx.recipe.x.detach().requires_grad_(ctx.recipe.x.requires_grad)
        logits = replace(ctx.recipe, x=x).compute()
        if logits.requires_grad:
            torch.autograd.backward(logits, grad)
        return None, None, x.grad, None


class LazyLogits(Tensor):
    """Logits `[..., vocabulary]` that are computed when an operation needs them; see the note above.

    Their `requires_grad` is `False`, because there is no graph before they are computed; results of operations on them
    have the same autograd history as with real logits. In-place functions are refused while a view of the same logits
    is in use.
    """

    @staticmethod
    def of(head: Head, x: Tensor, vocabulary: int) -> LazyLogits:
        """Return the lazy logits of a head for hidden states `[..., tokens of this shard, hidden]`."""
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        leading = (*x.shape[:-2], x.shape[-2] * head.shards)
        tracked = torch.is_grad_enabled()
        state = HeadState(head.module, tracked)
        recipe = Recipe(head, awaited(x), leading, (), tracked, state, ambient_autocast(device))
        return LazyLogits.with_graph(recipe, vocabulary, dtype, _Family())

    @staticmethod
    def with_graph(recipe: Recipe, vocabulary: int, dtype: torch.dtype, family: _Family) -> LazyLogits:
        """Return lazy logits that have a graph for autograd functions if real logits have one."""
        lazy = functools.partial(LazyLogits, recipe, vocabulary, dtype, family)
        if not (recipe.tracked and torch.is_grad_enabled()):
            return lazy()
        return _PassedOn.apply(lazy, recipe, recipe.x, torch.empty(0, requires_grad=True))

    @staticmethod
    def __new__(cls, recipe: Recipe, vocabulary: int, dtype: torch.dtype, family: _Family) -> Self:
        shape = (*recipe.leading, vocabulary)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=recipe.x.device)

    def __init__(self, recipe: Recipe, vocabulary: int, dtype: torch.dtype, family: _Family) -> None:
        self._recipe, self._family = recipe, family
        self._real: Tensor | None = None
        family.add(self)

    @property
    def hidden_states(self) -> Tensor:
        """The hidden states of which these are the logits."""
        return self._recipe.x

    def materialize(self) -> Tensor:
        """Return the real logits, which are computed once and used by all operations from then on."""
        self._family.check()
        if self._real is None:
            self._real = self._recipe.compute()
        return self._real

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyLogits(shape={list(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(DTensor, name) and self._recipe.head.parts > 1:
            return getattr(self.materialize(), name)
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
        if func in _OF_GRAPH:
            return _OF_GRAPH[func]
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _OF_GRADIENTS:
            raise RuntimeError(
                "the gradient of logits is not computed as a whole, because the loss is computed in chunks: set "
                "loss_chunk_tokens=None"
            )
        if args and isinstance(args[0], LazyLogits) and args[0]._real is None:
            result = args[0]._record(func, tuple(args[1:]), kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.materialize, (tuple(args), kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(
            f"{func} reached logits that are not computed, because the loss is computed in chunks, as it does within "
            "torch.vmap: set loss_chunk_tokens=None"
        )

    # ---- operations without real logits

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._family.check()
        name = func.__name__
        if func is F.cross_entropy:
            return self._cross_entropy(*args, **kwargs)
        if func is Tensor.detach:
            return self._view(self._with(x=self._recipe.x.detach(), tracked=False))
        if func is Tensor.__getitem__:
            return self._choose(*args)
        if name == "argmax":
            return self._argmax(*args, **kwargs)
        if name in _OF_TWO and len(args) == 1 and not kwargs and isinstance(args[0], LazyLogits):
            return self._join(args[0], func)
        if self._is_whole and (sizes := rows_of_parts(name, self.shape, args, kwargs)) is not None:
            return self._divide(sizes, squeezed=name == "unbind")
        if self._is_whole and (normalised := normalising(name, self.shape, args, kwargs)) is not None:
            return self._apply(normalised, (), cast=False)
        if self._is_whole and (function := token_function(name, self.shape, args, kwargs)) is not None:
            return self._values(function)
        if name in _POINTWISE:
            return self._apply(lambda t: func(t, *args, **kwargs), (*args, *kwargs.values()), name in _CASTS)
        if name in _ARRANGING:
            return self._arrange(lambda t: func(t, *args, **kwargs))
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            self._refuse_views(name)
        return NotImplemented

    def _with(self, **changes: Any) -> Recipe:
        """Return a changed recipe, for the result of an operation on these logits."""
        return replace(self._recipe, **{"tracked": self._recipe.tracked and torch.is_grad_enabled()} | changes)

    def _view(self, recipe: Recipe) -> LazyLogits:
        """Return lazy logits for a view: real ones would share their memory with these."""
        return LazyLogits.with_graph(recipe, self.shape[-1], self.dtype, self._family)

    def _refuse_views(self, name: str) -> None:
        if self._family.in_use > 1:
            raise RuntimeError(
                f"{name} in place on logits of which a view is in use, or on such a view, and the other would not see "
                "the change: clone() them first, or set loss_chunk_tokens=None"
            )

    def _apply(self, function: Pointwise, arguments: Sequence[Any], cast: bool) -> Any:
        if any(isinstance(argument, Tensor) for argument in arguments):
            return NotImplemented
        probe = function(torch.empty(0, dtype=self.dtype, device=self.device))
        if not isinstance(probe, Tensor) or probe.device != self.device or not probe.is_floating_point():
            return NotImplemented
        if cast and probe.dtype == self.dtype and True not in arguments:  # copy=True
            return self
        recipe = self._with(pointwise=(*self._recipe.pointwise, self._as_now(function)))
        return LazyLogits.with_graph(recipe, self.shape[-1], probe.dtype, _Family())

    def _as_now(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs under the autocast of now, also in a backward."""
        autocast = ambient_autocast(self.device.type)

        def run(*tensors: Tensor) -> Any:
            with autocast():
                return function(*tensors)

        return run

    @property
    def _is_whole(self) -> bool:
        """Whether this process computes all logits of each token."""
        return self._recipe.head.shards == 1 and self._recipe.head.parts == 1

    def _join(self, other: LazyLogits, function: Callable[[Tensor, Tensor], Tensor]) -> Any:
        joined = self._recipe.joined(other._recipe, self._as_now(function)) if self._is_whole else None
        if joined is None or other._real is not None:
            return NotImplemented
        dtype = torch.promote_types(self.dtype, other.dtype)
        return LazyLogits.with_graph(joined, self.shape[-1], dtype, _Family())

    def _divide(self, sizes: Sequence[int], squeezed: bool) -> tuple[LazyLogits, ...]:
        """Return lazy logits of parts with these numbers of rows; `squeezed` are those of single rows."""
        parts = self._recipe.tokens_first().split(list(sizes))
        parts = [part[0] for part in parts] if squeezed else parts
        return tuple(self._view(self._with(x=part, leading=tuple(part.shape[:-1]))) for part in parts)

    def _values(self, function: TokenFunction) -> Any:
        with torch.set_grad_enabled(self._recipe.tracked and torch.is_grad_enabled()):
            values = self._recipe.values(self._as_now(function.values_of), *function.arguments)
        return function.wrap(values)

    def _arrange(self, function: Callable[[Tensor], Tensor]) -> Any:
        arranged = function(torch.empty(self.shape, dtype=self.dtype, device="meta"))
        if arranged.dtype != self.dtype or arranged.dim() < 1 or arranged.shape[-1] != self.shape[-1]:
            return NotImplemented
        return self if arranged.shape == self.shape else self._view(self._with(leading=tuple(arranged.shape[:-1])))

    def _choose(self, index: Any) -> Any:
        recipe = self._recipe
        if recipe.head.shards > 1 or not leaves_vocabulary(index, self.dim()):
            return NotImplemented
        x = recipe.tokens_first()[index]
        chosen = self._with(x=x, leading=tuple(x.shape[:-1]))
        if math.prod(chosen.leading) > recipe.head.chunk_tokens:
            return self._view(chosen)
        computed = chosen.compute()
        if not any(isinstance(part, Tensor) for part in parts_of(index)):
            self._family.add_computed(computed)  # of real logits, it would be a view
        return computed

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
            loss = chunked_cross_entropy(self._recipe.in_chunks(), self._recipe.x, target, ignore_index, reduction)
            return self._recipe.head.replicated(loss)

    def _argmax(self, dim: int | None = None, keepdim: bool = False) -> Any:
        head = self._recipe.head
        if head.shards > 1 or keepdim or dim not in (-1, self.dim() - 1):
            return NotImplemented
        return self._recipe.argmax()
