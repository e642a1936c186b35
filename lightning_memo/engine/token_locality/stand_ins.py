"""Stand-ins for parts of a layer, and for values of its attributes, while it runs on fake tensors."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_memo.engine.forward.intercept import DROPOUTS
from lightning_memo.engine.fp8_modules import is_norm
from lightning_memo.engine.fp8_state import PACKAGE
from lightning_memo.engine.recurrence import StateCall
from lightning_memo.engine.saved_tensors.side_effects import SET_DATA
from lightning_memo.engine.token_locality.operator_rules import TOKENS, TokensMixed, holds_tokens
from lightning_memo.engine.token_locality.token_tracker import TokenTracker, step_of_attention, step_of_recurrence
from lightning_memo.kernels import AttentionSpec
from lightning_memo.utils.replaced_functions import replaced


def attend_in_shape(tracker: TokenTracker, shards: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Answer an attention call. Attention may relate tokens, whose order it must know."""
    tracker.steps.append(step_of_attention(spec))
    if spec.mask is not None and holds_tokens(tracker.dims(spec.mask)):
        tracker.refuse("attention gets a mask that the layer makes of its own tokens")
    apart = ((), tracker.sizes.of_size(shards * tracker.sizes.tokens), ())
    queries, keys, values = (tuple(dim if TOKENS in dim else () for dim in tracker.dims(t)[1:]) for t in (q, k, v))
    if queries == keys == values == ((), (), ()):
        tracker.refuse("attention gets other tokens than those of hidden states [batch, tokens, ...]")
    if keys == values == ((), (), ()):
        tracker.refuse("attention gets the same keys for all slices (cross-attention)")
    if not queries == keys == values == apart:
        tracker.refuse("attention gets queries, keys or values that do not hold one entry for each token")
    out = attended(q, k, v)
    return tracker.mark(out, (*tracker.dims(q)[:3], tracker.dims(v)[3]))


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a tensor of the shape of an attention call's result, with history."""
    out: Tensor = _Attended.apply(q, k, v)
    return out


def hand_in_shape(tracker: TokenTracker, call: StateCall) -> Tensor:
    """Answer a call of a function that hands a state from token to token, in their order."""
    tracker.steps.append(step_of_recurrence(call))
    by_token = call.by_token
    for t in (t for t in call.arguments if isinstance(t, Tensor)):
        dims = list(tracker.dims(t))
        if any(t is each for each in by_token) and dims.pop(call.token_dim) != tracker.sizes.of_size(
            tracker.sizes.tokens
        ):
            tracker.refuse(f"{call.name} gets tensors that do not hold one entry for each token")
        elif holds_tokens(dims):
            tracker.refuse(f"{call.name} gets tokens in other places than in their order")
    out = handed(call)
    dims = tracker.dims(call.like)
    return tracker.mark(out, dims)


def handed(call: StateCall) -> Tensor:
    """Return a tensor of the shape of the result of a function that hands a state, with history."""
    out: Tensor = _Handed.apply(call.like.shape, *(t for t in call.arguments if isinstance(t, Tensor)))
    return out


def refuse(why: str) -> None:
    """End the proof, because the layer computes attention by operations of its own.

    Raises:
        TokensMixed: Always.
    """
    raise TokensMixed(why)


class _Attended(torch.autograd.Function):
    """Has the shapes of attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v)
        return q.new_empty((*q.shape[:3], v.shape[3]))

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(t) for t in ctx.saved_tensors)


class _Handed(torch.autograd.Function):
    """Has the shapes of a function that hands a state from token to token."""

    @staticmethod
    def forward(ctx: Any, shape: torch.Size, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_empty(shape)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:
        return None, *(torch.empty_like(t) for t in ctx.saved_tensors)


def forward_in_shape(module: nn.Module, tracker: TokenTracker | None) -> Callable[..., Tensor] | None:
    """Return a stand-in for the forward of a module that does not run on fake tensors; `None` for all other modules."""
    package = type(module).__module__.partition(".")[0]
    # Tensor parallelism derives a class from the one whose forward transformers wraps.
    wrapped = any(hasattr(vars(kind).get("forward"), "__wrapped__") for kind in type(module).__mro__)
    if hasattr(module, "is_transposed") and hasattr(module, "has_bias") and wrapped:
        return functools.partial(_experts_in_shape, tracker)  # transformers has one interface for experts
    if package == "bitsandbytes" and isinstance(module, nn.Linear):
        return functools.partial(_linear_in_shape, tracker, module)
    return None


@contextlib.contextmanager
def kernels_in_shape() -> Iterator[None]:
    """Inside, operations of PyTorch stand in for kernels of liger-kernel and TransformerEngine, which need values."""
    with contextlib.ExitStack() as stack:
        for name, stand_in in _LIGER.items():
            kernel = getattr(sys.modules.get("liger_kernel.ops"), name, None)
            if kernel is not None:
                stack.enter_context(replaced(kernel, "apply", functools.partial(_without_own, stand_in)))
        fuser = getattr(sys.modules.get(f"{PACKAGE}.pytorch.ops.fuser"), "OperationFuser", None)
        if fuser is not None:
            stack.enter_context(replaced(fuser, "__call__", _fused_in_shape))
        yield


def _without_own(stand_in: Callable[..., Any], own: Callable[..., Any], *args: Any) -> Any:
    return stand_in(*args)


def _fused_in_shape(call: Callable[..., Any], fuser: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Answer a call of operations of TransformerEngine, if a norm is the only one."""
    norm = fuser._basic_ops[0] if len(fuser._basic_ops) == 1 else None
    # A user's class may compute otherwise.
    if norm is None or not is_norm(norm) or norm.op_forward.__module__.partition(".")[0] != PACKAGE:
        return call(fuser, x, *args, **kwargs)
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else norm.weight.dtype
    bias = None if getattr(norm, "bias", None) is None else norm.bias.to(dtype)
    return _layer_norm(x.to(dtype), norm.weight.to(dtype), bias, norm.eps).to(dtype)


def _silu_mul(a: Tensor, b: Tensor, *multipliers: float) -> Tensor:
    return F.silu(a) * b


def _gelu_mul(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a) * b


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, *settings: Any) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None if weight is None else weight.to(x.dtype), eps)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *settings: Any) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys `[batch, heads, tokens, head_dim]` by angles `[batch or 1, tokens, rotary_dim]`."""
    angles = (cos + sin)[..., :1].unsqueeze(-3)  # in shape only: each number depends on its token's angles
    return (q * angles).to(q.dtype), (k * angles).to(k.dtype)


_LIGER: Final = {
    "LigerSiLUMulFunction": _silu_mul,
    "LigerGELUMulFunction": _gelu_mul,
    "LigerRMSNormFunction": _rms_norm,
    "LigerLayerNormFunction": _layer_norm,
    "LigerRopeFunction": _rotate,
}
"""Functions of `liger_kernel.ops` that act on each token alone. A layer with others runs whole."""


def _experts_in_shape(tracker: TokenTracker | None, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Answer a call of the experts of transformers: each row of `x` [rows, hidden] goes to the experts of its indices.

    Raises:
        TokensMixed: Rows and indices belong to different tokens.
    """
    if tracker is None:
        return x.clone()
    rows, *others = (tracker.dims(t) for t in (x, indices, weights))
    if any(dims[0] != rows[0] for dims in others) or any(TOKENS in dim for dims in (rows, *others) for dim in dims[1:]):
        tracker.refuse("experts get indices of other tokens")
    return x.clone()


def _linear_in_shape(tracker: TokenTracker | None, module: nn.Linear, x: Tensor) -> Tensor:
    """Answer a call of a linear module of bitsandbytes.

    Raises:
        TokensMixed: It quantises tokens together.
    """
    if tracker is not None and getattr(getattr(module, "state", None), "threshold", 0.0) > 0.0:
        tracker.refuse("bitsandbytes finds the outliers of all tokens (without them: llm_int8_threshold=0.0)")
    if tracker is not None and module.weight.requires_grad:
        tracker.refuse("bitsandbytes quantises gradients of all tokens")
    return F.linear(x, x.new_empty(module.out_features, module.in_features))


class LocalFunctions(TorchFunctionMode):
    """Leaves out dropout, whose masks the engine cuts by token; see Note: [Dropout and slices].

    Args:
        tracker: Knows where tensors hold tokens; `None` if that is not followed.
        batch: Number of sequences in the layer's input.
        token_dim: Dimension of tokens in the layer's input.
        leave_out: Returns whether `t.data = data` is left out.

    Attributes:
        hooked: Whether the layer has registered a hook on a tensor.
        drops: Whether dropout was left out.
    """

    def __init__(
        self, tracker: TokenTracker | None, batch: int, token_dim: int, leave_out: Callable[[Tensor, Tensor], bool]
    ) -> None:
        super().__init__()
        self._leave_out = leave_out
        self.hooked = self.drops = False
        self._tracker, self._batch, self._token_dim = tracker, batch, token_dim

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in DROPOUTS:
            return self._dropout(*args, **(kwargs or {}))
        if func is Tensor.register_hook:
            self.hooked = True
        if func == SET_DATA and self._leave_out(*args):
            return None
        return func(*args, **(kwargs or {}))

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **names: Any
    ) -> Tensor:
        """Return a tensor like the input.

        Raises:
            TokensMixed: The input does not hold tokens where a slice would look for them.
        """
        self.drops |= names.get("train", training) and p > 0.0
        if self._tracker is not None and names.get("train", training) and p > 0.0:
            dims = self._tracker.dims(input)
            places = [n for n, dim in enumerate(dims) if TOKENS in dim]
            as_input = places == [self._token_dim] and len(dims) > 1 and input.shape[1 - self._token_dim] == self._batch
            joined = (
                places == [0] and self._token_dim == 1 and input.shape[0] == self._batch * self._tracker.sizes.tokens
            )
            if not (as_input or joined):
                self._tracker.refuse("dropout gets a tensor that does not hold the tokens as the layer's input does")
        return input.clone()


class Unusable:
    """Stands for a value that a proof must not use."""

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        raise TokensMixed("an attribute is used in which layers differ")

    def __getattribute__(self, name: str) -> Any:
        raise TokensMixed("an attribute is used in which layers differ")


_USES = """
bool int index float len iter next call getitem setitem contains eq ne lt le gt ge hash add radd sub rsub mul
rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs and rand or ror xor rxor invert lshift
rlshift rshift rrshift matmul rmatmul enter exit str repr format
"""
for _name in _USES.split():
    setattr(Unusable, f"__{_name}__", lambda self, *_: self.used)
