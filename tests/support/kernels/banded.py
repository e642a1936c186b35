"""A flash-attention kernel emulated on the CPU, according to the sources of flash kernels."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from lightning_memo.kernels.flash_attention import BandedFlash
from support.kernels.attention_reference import attention


def flash_sees(queries: int, keys: int, causal: bool, left: int, right: int, longest: int | None = None) -> Tensor:
    """The keys that flash kernels see for a flag and a window (`mha_fwd` and `set_params_fprop` of flash-attn).

    `longest` is the largest number of keys of several documents.
    """
    left, right = (-1 if side >= (longest or keys) else side for side in (left, right))
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


def documents_of(starts: tuple[Tensor, Tensor], longest: tuple[int, int]) -> list[tuple[slice, slice]]:
    """The queries and keys of each document of a call of variable lengths."""
    lengths = [each.diff().tolist() for each in starts]
    assert tuple(map(max, lengths)) == longest and all(each.dtype == torch.int32 for each in starts)
    return list(zip(*([slice(a, b) for a, b in pairwise(each.tolist())] for each in starts), strict=True))


def flash_varlen_forward(q, k, v, starts, longest, causal, left, right, scale):
    """Attention of documents, `[tokens, heads, head_dim]`, and the log-sum-exp `[heads, tokens]`."""
    parts = []
    for i, j in documents_of(starts, longest):
        seen = flash_sees(i.stop - i.start, j.stop - j.start, causal, left, right, longest[1])
        assert seen.any(-1).all()
        parts.append(flash_forward(q[None, i], k[None, j], v[None, j], seen, scale))
    return torch.cat([out[0] for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def flash_varlen_backward(dout, q, k, v, out, lse, starts, longest, causal, left, right, scale):
    """Gradients of documents, `[tokens, heads, head_dim]`."""
    parts = []
    for i, j in documents_of(starts, longest):
        seen = flash_sees(i.stop - i.start, j.stop - j.start, causal, left, right, longest[1])
        parts.append(
            flash_backward(
                dout[None, i], q[None, i], k[None, j], v[None, j], out[None, i], lse[None, :, i], seen, scale
            )
        )
    return tuple(torch.cat([part[0] for part in each]) for each in zip(*parts, strict=True))


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

    def _call_run(self, q, k, v, run, starts):
        return flash_varlen_forward(
            q, k, v, starts, run.longest, run.causal, run.left, run.right, run.spec.scale
        )  # fmt: skip

    def _call_run_backward(self, dout, q, k, v, out, lse, run, starts):
        scale = q.shape[-1] ** -0.5 if run.spec.scale is None else run.spec.scale
        return flash_varlen_backward(
            dout, q, k, v, out, lse, starts, run.longest, run.causal, run.left, run.right, scale
        )  # fmt: skip
