"""Feed-forwards and rotary positions, each by one kernel of Triton.

The kernels write into new tensors. What they read may be a product that the engine stores, be read again by another
backward of a retained graph, or be held by a user's hook.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_memo.utils.retained_graph import first_derivative

_COMPUTED = (torch.float32, torch.bfloat16, torch.float16)


class GatedActivation(torch.autograd.Function):
    """Computes :func:`gated_activation`. Its backward reads `gate` and `up`, and computes the activation again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.tanh = tanh
        if isinstance(gate, FakeTensor):  # in proofs
            return gated_activation(gate, up, tanh)
        return _kernels().gated(gate, up, tanh)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        if isinstance(gate, FakeTensor):
            with torch.enable_grad():
                given = gate.detach().requires_grad_(), up.detach().requires_grad_()
                return *torch.autograd.grad(gated_activation(*given, ctx.tanh), given, dout), None
        return *_kernels().gated_gradients(dout, gate, up, ctx.tanh), None


def gated_activation(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    """Return `silu(gate) * up`, or with GELU's tanh approximation in place of SiLU, by single operations."""
    return (F.gelu(gate, approximate="tanh") if tanh else F.silu(gate)) * up


def can_gate(gate: Tensor, up: Tensor) -> bool:
    """Return whether a kernel computes :func:`gated_activation` of these, in the same type as single operations."""
    fits = all(map(_is_plain, (gate, up))) and gate.dtype == up.dtype and gate.shape == up.shape
    return fits and gate.is_contiguous() and up.is_contiguous()


class Rotation(torch.autograd.Function):
    """Computes :func:`rotation` of queries and keys, by angles that need no gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(q, cos, sin), _rotated(k, cos, sin)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(dq, cos, sin, backward=True), _rotated(dk, cos, sin, backward=True), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> Tensor:
    if isinstance(x, FakeTensor):
        return rotation(x, cos, -sin if backward else sin)  # in shape only, unless both halves have the same angles
    return _kernels().rotated(x, cos, sin, backward)


def rotation(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return `x` `[batch, heads, tokens, head_dim]`, with both halves of each head rotated, by single operations.

    Args:
        x: Queries or keys.
        cos: Cosines, `[batch or 1, tokens, head_dim]`.
        sin: Sines.
    """
    first, second = x.chunk(2, -1)
    return x * cos.unsqueeze(1) + torch.cat([-second, first], -1) * sin.unsqueeze(1)


def can_rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Return whether a kernel computes :func:`rotation` of these, in the same type as single operations."""
    given = q, k, cos, sin
    if not all(map(_is_plain, given)) or len({t.dtype for t in given}) > 1 or cos.requires_grad or sin.requires_grad:
        return False
    if not q.dim() == k.dim() == 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    batch, _, tokens, head_dim = q.shape
    same = (k.shape[0], *k.shape[2:]) == (batch, tokens, head_dim) == (batch, *cos.shape[1:])
    return same and cos.shape[0] in (1, batch) and head_dim % 2 == 0


def _kernels() -> ModuleType:
    from lightning_memo.kernels import triton_kernels  # Triton imports slowly, and may be missing

    return triton_kernels


def _is_plain(t: Any) -> bool:
    return type(t) in (Tensor, FakeTensor) and t.dtype in _COMPUTED and not is_functorch_wrapped_tensor(t)
