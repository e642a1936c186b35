"""A flash-attention kernel emulated on the CPU, according to the sources of flash kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memo.kernels.flash_attention import BandedFlash
from support.kernels.attention_reference import attention


def flash_sees(queries: int, keys: int, causal: bool, left: int, right: int) -> Tensor:
    """The keys that flash kernels see for a flag and a window (`mha_fwd` and `set_params_fprop` of flash-attn)."""
    left, right = (-1 if side >= keys else side for side in (left, right))
    if causal:
        right = 0
    if left < 0 <= right and right > 0:
        left = keys
    if right < 0 <= left:
        right = keys
    shift = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)[None]  # query minus key
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if right >= 0:
        seen &= shift >= -right
    if left >= 0:
        seen &= shift <= left
    return seen


def flash_forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Attention of inputs `[batch, tokens, heads, head_dim]`; the output has the same layout."""
    out, lse = attention(*(t.transpose(1, 2) for t in (q, k, v)), seen, scale)
    return out.transpose(1, 2), lse


def flash_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Tensor, scale: float
) -> list[Tensor]:
    """Gradients from the given output and log-sum-exp, as kernels compute them."""
    groups = q.shape[2] // k.shape[2]
    dout, q, out = (t.transpose(1, 2) for t in (dout, q, out))
    k, v = (t.transpose(1, 2).repeat_interleave(groups, 1) for t in (k, v))
    weights = torch.exp((q @ k.transpose(-1, -2) * scale).masked_fill(~seen, -torch.inf) - lse[..., None])
    scores = weights * (dout @ v.transpose(-1, -2) - (dout * out).sum(-1, keepdim=True)) * scale
    grads = [scores @ k, *(t.unflatten(1, (-1, groups)).sum(2) for t in (scores.mT @ q, weights.mT @ dout))]
    return [t.transpose(1, 2) for t in grads]


class CpuBanded(BandedFlash):
    """A flash kernel for the CPU."""

    def _call(self, q, k, v, spec, band):
        seen = flash_sees(q.shape[1], k.shape[1], band.causal, band.left, band.right)
        assert seen.any(-1).all()  # no call for queries that see nothing: kernels give them an infinite log-sum-exp
        return (*flash_forward(q, k, v, seen, spec.scale), band)

    def _call_backward(self, dout, q, k, v, out, lse, spec, band, state):
        assert state == band
        seen = flash_sees(q.shape[1], k.shape[1], band.causal, band.left, band.right)
        scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
        return tuple(flash_backward(dout, q, k, v, out, lse, seen, scale))
