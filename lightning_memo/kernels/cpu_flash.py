"""Flash attention on a CPU: PyTorch's own kernel, with explicit output and log-sum-exp."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import (
    AttentionResult,
    AttentionSpec,
    additive,
    block_mask,
    finite,
    repeat_heads,
    sees_nothing_result,
    sum_head_groups,
    sums_dtype,
    token_major,
)

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlash:
    """PyTorch's flash kernel for the CPU, which plain training runs without dropout.

    It is `aten::_scaled_dot_product_flash_attention_for_cpu`. Its causal flag aligns the first query with the first
    key. Other blocks need masks, which are built for some queries at a time. Plans do not count these masks, because
    the profiled step has no slices and therefore needs none.
    """

    name = "sdpa"
    blocks = True
    # Entries of a mask: 1 MiB in fp32. Up to 512 queries and keys, one call has the arithmetic of plain training with a
    # window.
    mask_entries = 1 << 18

    @staticmethod
    def serves(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0) -> bool:
        return True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        parts = [
            self._forward(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], spec, query_start + rows.start, key_start + keys.start
            )
            for rows, keys in self._chunks(q, k, spec, query_start, key_start)
        ]
        if len(parts) == 1:
            return parts[0]
        out = torch.cat([p.out.transpose(1, 2) for p in parts], 1).transpose(1, 2)
        return AttentionResult(out, torch.cat([p.lse for p in parts], 2))

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
        chunks = self._chunks(q, k, spec, query_start, key_start)
        if len(chunks) == 1:
            return self._backward(dout, q, k, v, result, spec, query_start, key_start)
        dqs, dk, dv = [], torch.zeros_like(k, dtype=sums_dtype(k)), torch.zeros_like(v, dtype=sums_dtype(v))
        for rows, keys in chunks:
            part = AttentionResult(result.out[:, :, rows], result.lse[:, :, rows])
            dq, dk_part, dv_part = self._backward(
                dout[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], part, spec,
                query_start + rows.start, key_start + keys.start,
            )  # fmt: skip
            dqs.append(dq)
            dk[:, :, keys] += dk_part
            dv[:, :, keys] += dv_part
        return torch.cat(dqs, 2), dk.to(k.dtype), dv.to(v.dtype)

    def _chunks(
        self, q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int, key_start: int
    ) -> list[tuple[slice, slice]]:
        """Return ranges of queries with the keys that they can see: one range, unless a large mask must be divided."""
        queries, keys = q.shape[2], k.shape[2]
        diagonal = query_start != key_start and key_start + keys - 1 > query_start
        needs_mask = spec.window is not None or (spec.causal and diagonal)
        rows = self._rows_of_a_mask(q.shape[0], keys, spec)
        if not needs_mask or queries <= rows:
            return [(slice(0, queries), slice(0, keys))]
        chunks = []
        for first in range(0, queries, rows):
            last = min(first + rows, queries)
            low = 0 if spec.window is None else max(query_start + first - spec.window + 1 - key_start, 0)
            high = max(min(query_start + last - key_start, keys), 0)
            chunks.append((slice(first, last), slice(low, high)))
        return chunks

    def _rows_of_a_mask(self, batch: int, keys: int, spec: AttentionSpec) -> int:
        most = math.isqrt(self.mask_entries)
        seen = keys if spec.window is None else min(keys, spec.window + most)
        masks = 1 if spec.lengths is None else batch
        return max(min(self.mask_entries // max(masks * seen, 1), most), 1)

    def _arguments(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int, key_start: int
    ) -> tuple[Tensor, Tensor, int, Tensor | None, bool]:
        groups = q.shape[1] // k.shape[1]
        mask, causal = spec.mask, False
        if mask is None:
            queries = range(query_start, query_start + q.shape[2])
            keys = range(key_start, key_start + k.shape[2])
            mask, causal = block_mask(spec, q.shape[0], queries, keys, q.device)
        return repeat_heads(k, groups), repeat_heads(v, groups), groups, additive(mask, q.dtype), causal

    def _forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int, key_start: int
    ) -> AttentionResult:
        if k.shape[2] == 0:
            return sees_nothing_result(q, v)
        k, v, _, mask, causal = self._arguments(q, k, v, spec, query_start, key_start)
        out, lse = _forward(q, k, v, 0.0, causal, attn_mask=mask, scale=spec.scale)
        if mask is not None:
            # The kernel returns 0 for queries that see no key.
            lse = lse.masked_fill((mask == -math.inf).all(-1), -math.inf)
        return AttentionResult(token_major(out), lse)

    def _backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
        query_start: int,
        key_start: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if k.shape[2] == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        k, v, groups, mask, causal = self._arguments(q, k, v, spec, query_start, key_start)
        lse = finite(result.lse) if mask is not None else result.lse
        dq, dk, dv = _backward(dout, q, k, v, result.out, lse, 0.0, causal, attn_mask=mask, scale=spec.scale)
        return dq, sum_head_groups(dk, groups), sum_head_groups(dv, groups)
