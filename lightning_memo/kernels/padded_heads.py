"""Attention whose values have another head size than the keys, by kernels that need equal sizes."""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from torch import Tensor

from lightning_memo.kernels.attention_kernel import AttentionBackend, AttentionResult, AttentionSpec, token_major


def padded_heads(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """Return the call with zeros at the end of each head, such that all heads have the same size."""
    size = max(q.shape[-1], v.shape[-1])
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    return _padded(q, size), _padded(k, size), _padded(v, size), replace(spec, scale=scale)


def _padded(t: Tensor, size: int) -> Tensor:
    return t if t.shape[-1] == size else F.pad(t, (0, size - t.shape[-1]))


class PaddedHeads:
    """Calls a kernel with padded heads. Zeros change neither scores nor outputs, so that the result is exact.

    Args:
        inner: The kernel.
    """

    def __init__(self, inner: AttentionBackend) -> None:
        self._inner = inner
        self.name, self.blocks = inner.name, inner.blocks

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        width = v.shape[-1]
        result = self._inner.forward(*padded_heads(q, k, v, spec), query_start, key_start)
        return replace(result, out=token_major(result.out[..., :width]))

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
        size = max(q.shape[-1], v.shape[-1])
        result = replace(result, out=_padded(result.out, size))
        *padded, spec_of_all = padded_heads(q, k, v, spec)
        grads = self._inner.backward(
            _padded(dout, size), *padded, result, spec_of_all, query_start, key_start
        )  # fmt: skip
        dq, dk, dv = (grad[..., : t.shape[-1]] for grad, t in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv
