"""cuDNN's fused attention, called through PyTorch's operators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import AttentionResult, AttentionSpec, side_by_side, token_major
from lightning_memo.kernels.flash_attention import LONGEST_OF_SLOWER, AtenFlash

_LARGEST_HEAD = 128  # larger head sizes work on some GPUs only
_DROPOUT_STEPS = 16  # cuDNN's dropout probability is a multiple of 1/16
_WITHOUT_DROPOUT = range(91101, 91400)  # versions of cuDNN without dropout
_MERGED_HEADS = 4  # of which outputs are in fp32 at a time


class CudnnSdpa(AtenFlash):
    """cuDNN's attention (`aten::_scaled_dot_product_cudnn_attention`).

    Its causal flag is aligned at the first query and the first key, and it supports neither windows nor padding. The
    queries of a slice therefore see the keys of earlier slices in one call without a mask and their own in a causal
    call, and both results are merged. Windows and padded batches are passed on to PyTorch's flash kernel, and so is
    everything if deterministic algorithms are requested. Grouped-query attention needs no repeated heads; the
    gradients of keys and values are summed over the heads of the queries.

    Note: [Rounding of merged outputs]
    Each call rounds its output to half precision, and the merged output is rounded once more. With weights w and 1 - w
    of two outputs of equal size, the variance of the rounding error is 1 + w^2 + (1 - w)^2 times that of one call: 1.5
    times where a query sees as much of earlier slices as of its own.
    """

    name = "cudnn"
    longest_joined = LONGEST_OF_SLOWER

    @staticmethod
    def serves(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0) -> bool:
        if spec.window is not None or spec.lengths is not None or torch.are_deterministic_algorithms_enabled():
            return False
        if spec.dropout and (
            spec.dropout * _DROPOUT_STEPS % 1 or (torch.backends.cudnn.version() or 0) in _WITHOUT_DROPOUT
        ):
            return False
        parts = _parts(q, k, spec, query_start, key_start)
        if not parts or (spec.dropout and len(parts) > 1):
            return False
        # With some versions of cuDNN, PyTorch refuses a single query or key.
        shortest = min(q.shape[2], *(keys.stop - keys.start for keys, _ in parts))
        return shortest > 1 and q.shape[3] <= _LARGEST_HEAD

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        if not self.serves(q, k, spec, query_start, key_start):
            return super().forward(q, k, v, spec, query_start, key_start)
        parts = [
            _forward(q, k[:, :, keys], v[:, :, keys], replace(spec, causal=causal))
            for keys, causal in _parts(q, k, spec, query_start, key_start)
        ]
        result = parts[0] if len(parts) == 1 else _merged(*parts)
        return replace(result, state=[part.state for part in parts])

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
        query_start: int = 0,
        key_start: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self.serves(q, k, spec, query_start, key_start):
            return super().backward(dout, q, k, v, result, spec, query_start, key_start)
        dout, out, lse = token_major(dout), token_major(result.out), result.lse.contiguous()
        parts = [
            _backward(dout, q, k[:, :, keys], v[:, :, keys], out, lse, state, replace(spec, causal=causal))
            for (keys, causal), state in zip(_parts(q, k, spec, query_start, key_start), result.state, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        (dq, *earlier), (own_dq, *own) = parts
        dk, dv = (torch.cat(pair, 2) for pair in zip(earlier, own, strict=True))
        return dq.add_(own_dq), dk, dv


def _parts(
    q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int, key_start: int
) -> tuple[tuple[slice, bool], ...]:
    """Return the keys and the causal flag of each call that a block consists of; none if it can't be divided so."""
    queries, keys = q.shape[2], k.shape[2]
    earlier = query_start - key_start
    if not spec.causal or earlier >= keys:
        return ((slice(0, keys), False),)
    if keys - earlier != queries or earlier < 0:
        return ()
    own = (slice(earlier, keys), True)
    return (own,) if earlier == 0 else ((slice(0, earlier), False), own)


def _merged(earlier: AttentionResult, own: AttentionResult) -> AttentionResult:
    """Merge the results for the keys of earlier slices and of the own one, in the memory of the first."""
    own_weight = torch.sigmoid(own.lse - earlier.lse)[..., None]
    weight = torch.sigmoid(earlier.lse - own.lse)[..., None]  # 1 - own_weight would round where it is small
    for first in range(0, earlier.out.shape[1], _MERGED_HEADS):
        heads = slice(first, first + _MERGED_HEADS)
        merged = own.out[:, heads] * own_weight[:, heads]
        # Each output is read and written once, and converted on the way.
        torch.addcmul(merged, earlier.out[:, heads], weight[:, heads], out=earlier.out[:, heads])
    return replace(earlier, lse=torch.logaddexp(earlier.lse, own.lse))


def _forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> AttentionResult:
    out, lse, *rest, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *map(side_by_side, (q, k, v)), None, True, spec.dropout, spec.causal, False, scale=spec.scale
    )
    # PyTorch's backward needs the log-sum-exp in the forward's shape, with or without a last dimension of 1.
    return AttentionResult(token_major(out), lse.reshape(q.shape[:3]), (lse.shape, rest))


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, state: Any, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor]:
    lse_shape, (starts_q, starts_k, max_q, max_k, seed, offset) = state
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, *map(side_by_side, (q, k, v)), out, lse.reshape(lse_shape), seed, offset, None, starts_q, starts_k, max_q,
        max_k, spec.dropout, spec.causal, scale=spec.scale,
    )  # fmt: skip
    return dq, dk, dv
