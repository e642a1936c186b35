"""cuDNN's fused attention, called through PyTorch's operators."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import AttentionResult, AttentionSpec, side_by_side, token_major
from lightning_memo.kernels.flash_attention import AtenFlash

_LARGEST_HEAD = 128  # larger head sizes work on some GPUs only
_DROPOUT_STEPS = 16  # cuDNN's dropout probability is a multiple of 1/16
_WITHOUT_DROPOUT = range(91101, 91400)  # versions of cuDNN without dropout


class CudnnSdpa(AtenFlash):
    """cuDNN's attention (`aten::_scaled_dot_product_cudnn_attention`).

    Its causal flag is aligned at the first query and the first key, and it supports neither windows nor padding. Blocks
    whose queries begin later than their keys, windows and padded batches are passed on to PyTorch's flash kernel, and
    so is everything if deterministic algorithms are requested. Grouped-query attention needs no repeated heads; the
    gradients of keys and values are summed over the heads of the queries.
    """

    name = "cudnn"

    @staticmethod
    def serves(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0) -> bool:
        queries, keys, head = q.shape[2], k.shape[2], q.shape[3]
        if spec.window is not None or spec.lengths is not None or torch.are_deterministic_algorithms_enabled():
            return False
        if spec.dropout and (
            spec.dropout * _DROPOUT_STEPS % 1 or (torch.backends.cudnn.version() or 0) in _WITHOUT_DROPOUT
        ):
            return False
        square = query_start == key_start and queries == keys
        # With some versions of cuDNN, PyTorch refuses a single query or key.
        return (square or not spec.causal) and min(queries, keys) > 1 and head <= _LARGEST_HEAD

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        if not self.serves(q, k, spec, query_start, key_start):
            return super().forward(q, k, v, spec, query_start, key_start)
        out, lse, *rest, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *map(side_by_side, (q, k, v)), None, True, spec.dropout, spec.causal, False, scale=spec.scale
        )
        # PyTorch's backward needs the log-sum-exp in the forward's shape, with or without a last dimension of 1.
        return AttentionResult(token_major(out), lse.reshape(q.shape[:3]), (lse.shape, rest))

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
        lse_shape, (starts_q, starts_k, max_q, max_k, seed, offset) = result.state
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            token_major(dout), *map(side_by_side, (q, k, v)), token_major(result.out),
            result.lse.contiguous().reshape(lse_shape), seed, offset, None, starts_q, starts_k, max_q, max_k,
            spec.dropout, spec.causal, scale=spec.scale,
        )  # fmt: skip
        return dq, dk, dv
