"""cuDNN's fused attention, through PyTorch's operators."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memo.kernels.attention import AttentionResult, AttentionSpec, repeat_heads, sum_head_groups
from lightning_memo.kernels.banded import AtenFlash


class CudnnSdpa(AtenFlash):
    """`aten::_scaled_dot_product_cudnn_attention`; blocks with a window or padding go to the flash kernel."""

    name = "cudnn"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        if not self._serves(spec):
            return super().forward(q, k, v, spec, query_start, key_start)
        groups = q.shape[1] // k.shape[1]
        out, lse, *state, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, repeat_heads(k, groups), repeat_heads(v, groups), None, True, spec.dropout,
            spec.causal and query_start == key_start, False, scale=spec.scale,
        )  # fmt: skip
        return AttentionResult(out, lse.reshape(q.shape[:3]), state)

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
        if not self._serves(spec):
            return super().backward(dout, q, k, v, result, spec, query_start, key_start)
        groups = q.shape[1] // k.shape[1]
        empty = torch.empty(0, dtype=torch.int64, device=q.device)
        state = result.state or (None, None, q.shape[2], k.shape[2], empty, empty)
        cum_q, cum_k, max_q, max_k, seed, offset = state
        dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            dout, q, repeat_heads(k, groups), repeat_heads(v, groups), result.out, result.lse.unsqueeze(-1), seed,
            offset, None, cum_q, cum_k, max_q, max_k, spec.dropout, spec.causal and query_start == key_start,
            scale=spec.scale,
        )  # fmt: skip
        return dq, sum_head_groups(dk, groups), sum_head_groups(dv, groups)

    @staticmethod
    def _serves(spec: AttentionSpec) -> bool:
        return spec.window is None and spec.lengths is None
