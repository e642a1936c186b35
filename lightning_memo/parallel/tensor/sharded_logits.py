"""Logits of which each tensor-parallel process has a part of the vocabulary.

Note: [What runs on parts]
`ShardedLogits` give every function the result that it has on whole logits. Functions of single logits (a cast, a
scale, a soft cap) and functions that only arrange tokens run on the parts. So do `log_softmax` and `softmax` over the
vocabulary, and `sum`, `gather` and `cross_entropy`, which add up over the processes what the parts give. Any other
function gets the logits of the whole vocabulary, gathered for this call. Plain tensors count as equal in all processes.

Each function has the gradient of its own result, whatever function follows it. In PyTorch's `loss_parallel()`, which
holds for all DTensors of the process, `log_softmax` has the right gradient in front of `nll_loss` only.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_memo.utils.retained_graph import first_derivative

# Names of functions in `torch` and of methods of `Tensor`.
_POINTWISE = {
    *("abs", "add", "clamp", "clone", "detach", "div", "exp", "mul", "neg", "pow", "square", "sub", "tanh"),
    *("true_divide", "bfloat16", "double", "float", "half", "to", "type", "type_as"),
    *("__rdiv__", "__rpow__", "__rsub__"),
}  # fmt: skip
_ARRANGING = {"contiguous", "flatten", "reshape", "squeeze", "unsqueeze", "view", "__getitem__"}
_SWAPPING = {"movedim", "permute", "swapaxes", "swapdims", "transpose"}
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "pow"))}
_IN_PLACE_ON_PARTS = {*_POINTWISE, "truediv", "masked_fill", "requires_grad", "zero"}
# What a tensor is, and its graph.
_OF_TENSOR = {
    *("__get__", "__set__", "__delete__", "__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement"),
    *("stride", "element_size", "get_device", "is_contiguous", "is_floating_point", "is_complex", "storage_offset"),
    *("backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad"),
}  # fmt: skip


class ShardedLogits(DTensor):
    """Logits that are divided in the vocabulary, and what is computed from them; see the note above."""

    __slots__ = ()

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if (
            name in _OF_TENSOR
            or "out" in kwargs
            or (in_place and name.strip("_").removeprefix("i") in _IN_PLACE_ON_PARTS)
        ):
            return _on_parts(func, args, kwargs)
        if in_place and isinstance(first, DTensor):
            return _written(func, first, args[1:], kwargs)
        if isinstance(first, ShardedLogits) and (part := _Part.of(first)) is not None:
            if name in _POINTWISE or name in _SWAPPING or (name in _ARRANGING and part.stays(func, args[1:], kwargs)):
                return _on_parts(func, args, kwargs)
            if name in _SUMMED and (result := _SUMMED[name](part, args[1:], kwargs)) is not None:
                return result
        return _on_whole(func, args, kwargs)


def sharded_logits(part: Tensor, mesh: DeviceMesh, vocabulary: int) -> ShardedLogits:
    """Return logits of which each process of a mesh has a part.

    Args:
        part: The logits of this process, `[..., part of the vocabulary]`.
        mesh: One-dimensional mesh of the processes.
        vocabulary: Number of logits of a token.
    """
    return _divided(part, mesh, part.dim() - 1, vocabulary)


def replicated(t: Tensor, mesh: DeviceMesh) -> ShardedLogits:
    """Return a tensor that is equal in all processes of a mesh, with the type of what is computed from logits."""
    return _as_logits(DTensor.from_local(t, mesh, [Replicate()], run_check=False))


def _divided(part: Tensor, mesh: DeviceMesh, dim: int, size: int) -> ShardedLogits:
    shape = torch.Size((*part.shape[:dim], size, *part.shape[dim + 1 :]))
    form = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
    return _as_logits(DTensor.from_local(part.contiguous(), mesh, [Shard(dim)], run_check=False, **form))


def _as_logits(t: DTensor) -> ShardedLogits:
    """Let a tensor be one of logits: the same object, with its graph. Sums over the processes are made at once."""
    if any(p.is_partial() for p in t.placements):
        t = t.redistribute(placements=[Replicate()])
    t.__class__ = ShardedLogits
    assert isinstance(t, ShardedLogits)
    return t


def _mesh_of(values: Any) -> DeviceMesh:
    return next(t.device_mesh for t in tree_leaves(values) if isinstance(t, ShardedLogits))


def _on_parts(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on parts."""
    mesh = _mesh_of((args, kwargs))

    def divided(t: Tensor) -> Tensor:
        return t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, [Replicate()], run_check=False)

    with torch._C.DisableTorchFunctionSubclass():
        result = func(*tree_map_only(Tensor, divided, args), **tree_map_only(Tensor, divided, kwargs))
        return tree_map_only(DTensor, _as_logits, result)


def _on_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function on the logits of the whole vocabulary."""
    mesh = _mesh_of((args, kwargs))
    args, kwargs = tree_map_only(DTensor, DTensor.full_tensor, (args, kwargs))
    return tree_map_only(Tensor, lambda t: t if isinstance(t, DTensor) else replicated(t, mesh), func(*args, **kwargs))


def _written(func: Callable[..., Any], first: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """Let a function write into a copy of the whole tensor, and copy this process's part back."""
    mesh, copy = first.device_mesh, first.full_tensor().clone()
    func(copy, *args, **kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        whole = DTensor.from_local(copy, mesh, [Replicate()], run_check=False)
        first.copy_(whole.redistribute(placements=first.placements))
    return first


@dataclass(frozen=True, slots=True)
class _Part:
    """The logits of this process.

    Attributes:
        logits: The logits of all processes.
        dim: Dimension of the vocabulary.
        first: First token id of the part.
    """

    logits: ShardedLogits
    dim: int
    first: int

    @classmethod
    def of(cls, logits: ShardedLogits) -> _Part | None:
        placement, mesh = logits.placements[0], logits.device_mesh
        if not isinstance(placement, Shard):
            return None
        return cls(logits, placement.dim, -(-logits.shape[placement.dim] // mesh.size()) * mesh.get_local_rank())

    def stays(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a function that arranges elements leaves the vocabulary as the last dimension."""
        shape = self.logits.shape
        if self.dim != len(shape) - 1 or any(isinstance(t, Tensor) for t in tree_leaves((args, kwargs))):
            return False
        found = func(torch.empty(shape, device="meta"), *args, **kwargs)
        columns = found.dim() > 0 and found.shape[-1] == shape[-1] and found.stride(-1) == 1
        return columns and found.storage_offset() % shape[-1] == 0

    def local(self) -> Tensor:
        """Return the logits of this process, in at least fp32."""
        part = self.logits.to_local()
        return part.to(torch.promote_types(part.dtype, torch.float32))

    def is_vocabulary(self, dim: Any) -> bool:
        """Return whether an argument names the dimension of the vocabulary."""
        if isinstance(dim, (tuple, list)) and len(dim) == 1:
            dim = dim[0]
        return type(dim) is int and dim % self.logits.dim() == self.dim

    def log_softmax(self) -> Tensor:
        """Return the logarithms of the probabilities of this process's part."""
        logarithms: Tensor = _LogSoftmax.apply(self.local(), self.dim, self.group)
        return logarithms

    @property
    def group(self) -> dist.ProcessGroup:
        return self.logits.device_mesh.get_group()

    def total(self, t: Tensor) -> Tensor:
        """Return the sum of a tensor over the processes."""
        total: Tensor = _Total.apply(t, self.group)
        return total

    def gather(self, values: Tensor, index: Tensor) -> Tensor:
        """Return values at token ids, like `torch.gather`, from the values of each process's part."""
        torch._assert_async(((index >= 0) & (index < self.logits.shape[self.dim])).all(), "index out of bounds")
        columns = values.shape[self.dim]
        here = (index >= self.first) & (index < self.first + columns)
        found = values.gather(self.dim, (index - self.first).clamp(0, columns - 1))
        return self.total(found.where(here, 0))

    def divided(self, part: Tensor) -> ShardedLogits:
        """Return the tensor of which each process has such a part."""
        return _divided(part, self.logits.device_mesh, self.dim, self.logits.shape[self.dim])

    def replicated(self, t: Tensor) -> ShardedLogits:
        """Return a tensor that is equal in all processes."""
        return replicated(t, self.logits.device_mesh)


def _plain(t: Any) -> Any:
    return t.full_tensor() if isinstance(t, DTensor) else t


def _dtype_of(function: Callable[[Tensor], Tensor], part: _Part) -> torch.dtype:
    """Return the dtype of a function's result, also under autocast."""
    return function(torch.zeros(1, 1, dtype=part.logits.dtype, device=part.logits.device)).dtype


def _bound(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function; `None` if its signature does not have these arguments."""
    try:
        bound = inspect.signature(call).bind(*args, **kwargs)
    except TypeError:
        return None
    return call(*bound.args, **bound.kwargs)


def _log_softmax(part: _Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(dim: Any, *, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> Any:
        if not part.is_vocabulary(dim):
            return None
        to = _dtype_of(lambda t: t.log_softmax(-1, dtype=dtype), part)
        return part.divided(part.log_softmax().to(to))

    return _bound(call, args, kwargs)


def _softmax(part: _Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(dim: Any, *, dtype: torch.dtype | None = None, _stacklevel: int = 3) -> Any:
        if not part.is_vocabulary(dim):
            return None
        to = _dtype_of(lambda t: t.softmax(-1, dtype=dtype), part)
        return part.divided(part.log_softmax().exp().to(to))

    return _bound(call, args, kwargs)


def _sum(part: _Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(dim: Any, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
        if not part.is_vocabulary(dim):
            return None
        total = part.total(part.local().sum(part.dim, keepdim))
        return part.replicated(total.to(_dtype_of(lambda t: t.sum(-1, dtype=dtype), part)))

    return _bound(call, args, kwargs)


def _gather(part: _Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(dim: Any, index: Tensor) -> Any:
        if not part.is_vocabulary(dim):
            return None
        return part.replicated(part.gather(part.logits.to_local(), _plain(index)))

    return _bound(call, args, kwargs)


def _cross_entropy(part: _Part, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    def call(
        target: Tensor,
        weight: Tensor | None = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Any:
        of_classes = part.dim == min(1, part.logits.dim() - 1)
        indices = not target.is_floating_point() and target.dim() == part.logits.dim() - 1
        if not (of_classes and indices and size_average is reduce is None and reduction in ("none", "mean", "sum")):
            return None
        to = _dtype_of(lambda t: F.cross_entropy(t, torch.zeros(1, dtype=torch.int64, device=t.device)), part)
        labels = _Labels(_plain(target), ignore_index, _plain(weight))
        return part.replicated(labels.cross_entropy(part, reduction, label_smoothing).to(to))

    return _bound(call, args, kwargs)


@dataclass(frozen=True, slots=True)
class _Labels:
    """The labels of tokens.

    Attributes:
        target: Token ids.
        ignored: The id of tokens that do not contribute to the loss.
        weight: A weight for each token id, or `None`.
    """

    target: Tensor
    ignored: int
    weight: Tensor | None

    def cross_entropy(self, part: _Part, reduction: str, smoothing: float) -> Tensor:
        """Return the cross-entropy, as `torch.nn.functional.cross_entropy` defines it."""
        valid = self.target != self.ignored
        known = self.target.where(valid, 0)
        logarithms = part.log_softmax()
        losses = -part.gather(logarithms, known.unsqueeze(part.dim)).squeeze(part.dim)
        weights = torch.ones_like(losses) if self.weight is None else self.weight.to(losses.dtype)[known]
        losses = losses * weights
        if smoothing > 0:
            classes = part.logits.shape[part.dim]
            others = -part.total(self._weighted(part, logarithms).sum(part.dim))
            losses = (1 - smoothing) * losses + smoothing / classes * others
        losses = losses.where(valid, 0)
        if reduction == "none":
            return losses
        return losses.sum() / weights.where(valid, 0).sum() if reduction == "mean" else losses.sum()

    def _weighted(self, part: _Part, logarithms: Tensor) -> Tensor:
        if self.weight is None:
            return logarithms
        own = self.weight.to(logarithms.dtype)[part.first : part.first + logarithms.shape[part.dim]]
        return logarithms * own.view(-1, *[1] * (logarithms.dim() - part.dim - 1))


# Functions over the vocabulary; each returns `None` if another form of it is called.
_SUMMED: dict[str, Callable[[_Part, tuple[Any, ...], dict[str, Any]], Any]] = {
    "log_softmax": _log_softmax,
    "softmax": _softmax,
    "sum": _sum,
    "gather": _gather,
    "cross_entropy": _cross_entropy,
}


class _Total(torch.autograd.Function):
    """The sum over the processes, with which all of them compute the same."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = t.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        largest = z.amax(dim, keepdim=True)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        logarithms = z - largest
        total = logarithms.exp().sum(dim, keepdim=True)
        dist.all_reduce(total, group=group)
        logarithms.sub_(total.log_())
        ctx.save_for_backward(logarithms)
        ctx.dim, ctx.group = dim, group
        return logarithms

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (logarithms,) = ctx.saved_tensors
        total = gradient.sum(ctx.dim, keepdim=True)
        dist.all_reduce(total, group=ctx.group)
        return gradient - logarithms.exp().mul_(total), None, None
