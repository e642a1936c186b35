"""Attention for calls that no flash kernel computes: PyTorch's attention, run again in the backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memo.kernels.attention_kernel import AttentionResult, AttentionSpec, block_mask, token_major
from lightning_memo.kernels.rng_state import RngState

# The engine replaces `F.scaled_dot_product_attention` while layers run; this is PyTorch's own function.
_sdpa = F.scaled_dot_product_attention


class Replay:
    """Calls `scaled_dot_product_attention`, and replays it with the saved random state in the backward.

    Results are bit-identical to plain training, including dropout. Neither scores nor probabilities are stored, but
    attention is computed twice. It is used for attention dropout on a CPU, for fp32 on CUDA, and for head sizes that
    flash kernels do not support.
    """

    name = "replay"
    blocks = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        state = RngState.capture(q.device)
        out = self._attend(q, k, v, spec)
        return AttentionResult(token_major(out), out.new_empty((*q.shape[:2], 0), dtype=torch.float32), state)

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
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        with result.state.replayed(), torch.enable_grad():
            out = self._attend(q, k, v, spec)
        dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
        return dq, dk, dv

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        mask, causal = spec.mask, False
        if mask is None:
            queries, keys = range(q.shape[2]), range(k.shape[2])
            mask, causal = block_mask(spec, q.shape[0], queries, keys, q.device, flag_with_mask=False)
        return _sdpa(
            q, k, v, attn_mask=mask, dropout_p=spec.dropout, is_causal=causal, scale=spec.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
