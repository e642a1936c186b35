"""Triton's kernels of feed-forwards and rotary positions. They write into new tensors only.

The package triton has to be installed to import this.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_MOST_HEADS = 32  # of one program


@triton.jit
def _gated(gate, up, out, numbers, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(gate + at, mask=at < numbers, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=at < numbers, other=0.0)
    u = x
    if TANH:  # (1 + tanh(u / 2)) / 2 is sigmoid(u)
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    activation = (x * tl.sigmoid(u)).to(y.dtype)  # rounded as the result of a single operation
    tl.store(out + at, activation.to(tl.float32) * y.to(tl.float32), mask=at < numbers)


@triton.jit
def _gated_gradients(dout, gate, up, dgate, dup, numbers, TANH: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dout + at, mask=at < numbers, other=0.0).to(tl.float32)
    x = tl.load(gate + at, mask=at < numbers, other=0.0).to(tl.float32)
    y = tl.load(up + at, mask=at < numbers, other=0.0).to(tl.float32)
    u = x
    if TANH:
        u = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    s = tl.sigmoid(u)
    bend = x * s * tl.sigmoid(-u)  # 1 - s would cancel
    if TANH:
        bend *= 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    tl.store(dgate + at, dy * y * (s + bend), mask=at < numbers)
    tl.store(dup + at, dy * (x * s), mask=at < numbers)


@triton.jit
def _rotated(
    x, cos, sin, out, tokens, heads, half, x_batch, x_head, x_token, out_batch, out_head, out_token,
    cos_batch, cos_token, sin_batch, sin_token, BACKWARD: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]).to(tl.int64)
    at = tl.arange(0, HALF)[None, :]
    inside, within = at < half, (at < half) & (head < heads)
    x += batch * x_batch + token * x_token + head * x_head + at
    cos += batch * cos_batch + token * cos_token + at
    sin += batch * sin_batch + token * sin_token + at
    out += batch * out_batch + token * out_token + head * out_head + at
    x1 = tl.load(x, mask=within, other=0.0).to(tl.float32)
    x2 = tl.load(x + half, mask=within, other=0.0).to(tl.float32)
    cos1 = tl.load(cos, mask=inside, other=0.0).to(tl.float32)
    cos2 = tl.load(cos + half, mask=inside, other=0.0).to(tl.float32)
    sin1 = tl.load(sin, mask=inside, other=0.0).to(tl.float32)
    sin2 = tl.load(sin + half, mask=inside, other=0.0).to(tl.float32)
    if BACKWARD:
        y1, y2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
    else:
        y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    tl.store(out, y1, mask=within)
    tl.store(out + half, y2, mask=within)


def gated(gate: Tensor, up: Tensor, tanh: bool) -> Tensor:
    """Return `silu(gate) * up`, or with GELU's tanh approximation in place of SiLU. Both are contiguous."""
    out = torch.empty_like(gate)
    with _device_of(gate):
        _gated[(triton.cdiv(gate.numel(), _BLOCK),)](gate, up, out, gate.numel(), TANH=tanh, BLOCK=_BLOCK)
    return out


def gated_gradients(dout: Tensor, gate: Tensor, up: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate` and `up`."""
    dout, dgate, dup, grid = dout.contiguous(), torch.empty_like(gate), torch.empty_like(up), gate.numel()
    with _device_of(gate):
        _gated_gradients[(triton.cdiv(grid, _BLOCK),)](dout, gate, up, dgate, dup, grid, TANH=tanh, BLOCK=_BLOCK)
    return dgate, dup


def rotated(x: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> Tensor:
    """Return `x` `[batch, heads, tokens, head_dim]`, rotated by angles, or the gradient of `x` if it is the result's.

    Args:
        x: Queries, keys or a gradient.
        cos: Cosines, `[batch or 1, tokens, head_dim]`.
        sin: Sines.
        backward: Whether it is the gradient.
    """
    batch, heads, tokens, head_dim = x.shape
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    out = torch.empty_like(x)  # in the order of dimensions that single operations give their results
    in_one = min(_MOST_HEADS, triton.next_power_of_2(heads))
    cos, sin = cos.expand(batch, -1, -1), sin.expand(batch, -1, -1)
    with _device_of(x):
        _rotated[(batch * tokens, triton.cdiv(heads, in_one))](
            x, cos, sin, out, tokens, heads, head_dim // 2,
            *x.stride()[:3], *out.stride()[:3], *cos.stride()[:2], *sin.stride()[:2],
            BACKWARD=backward, HEADS=in_one, HALF=triton.next_power_of_2(head_dim // 2),
        )  # fmt: skip
    return out


def _device_of(x: Tensor) -> contextlib.AbstractContextManager[None]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
