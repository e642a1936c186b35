"""Flash attention on CUDA: PyTorch's own kernel and the flash-attn package, behind one banded call.

Both kernels know a causal flag and a window, aligned at the last query and the last key, and grouped-query heads, but
no mask. Padding and windows of a block are therefore expressed by the rows and keys that are passed at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_memo.kernels.attention import AttentionResult, AttentionSpec


@dataclass(frozen=True, slots=True)
class Band:
    """One kernel call: a part of the batch, its first `rows` queries, its first `keys` keys, and the window.

    `left` and `right` count from the diagonal that ends at the last query and the last key; -1 is unbounded.
    """

    batch: slice
    rows: int
    keys: int
    left: int
    right: int


def bands(spec: AttentionSpec, batch: int, queries: range, keys: range) -> Iterator[Band]:
    """The kernel calls that make up one block; rows and keys in none of them see nothing.

    With queries from `q0`, keys from `k0`, key `j` is seen by query `i` when `j + k0 <= i + q0` (causal) and
    `j + k0 > i + q0 - window`.
    """
    valid = [len(keys)] * batch
    if spec.lengths is not None:
        valid = [min(max(length - keys.start, 0), len(keys)) for length in spec.lengths]
    groups = [(slice(0, batch), valid[0])] if len(set(valid)) == 1 else [(slice(r, r + 1), n) for r, n in enumerate(valid)]
    for rows_of_batch, key_count in groups:
        stop = keys.start + key_count
        rows, left = len(queries), -1
        if spec.window is not None:
            rows = min(rows, stop - queries.start + spec.window - 1)
            left = key_count - rows - (queries.start - keys.start) + spec.window - 1
        if key_count == 0 or rows <= 0:
            continue
        right = queries.start + rows - stop if spec.causal else -1
        if spec.window is not None and queries.start + rows - 1 - keys.start < spec.window:
            left = -1
        if right >= key_count:
            right = -1
        yield Band(rows_of_batch, rows, key_count, left, right)


class BandedFlash:
    """Shared by the flash kernels of CUDA; subclasses make one call on `[batch, tokens, heads, head_dim]`."""

    name = "flash"
    blocks = True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        calls = self._bands(q, k, spec, query_start, key_start)
        parts = [self._call(*self._inputs(band, q, k, v), spec, band) for band in calls]
        states = [state for _, _, state in parts]
        if len(parts) == 1 and parts[0][0].shape[:2] == (q.shape[0], q.shape[2]):
            return AttentionResult(parts[0][0].transpose(1, 2), parts[0][1], states)
        out = torch.zeros_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        lse = torch.zeros(q.shape[:3], device=q.device, dtype=torch.float32)
        for band, (part, part_lse, _) in zip(calls, parts, strict=True):
            out[band.batch, : band.rows] = part
            lse[band.batch, :, : band.rows] = part_lse
        return AttentionResult(out.transpose(1, 2), lse, states)

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
        grads = [torch.zeros_like(t) for t in (q, k, v)]
        states = result.state or []
        for n, band in enumerate(self._bands(q, k, spec, query_start, key_start)):
            part_q, part_k, part_v = self._inputs(band, q, k, v)
            rows = (band.batch, slice(None), slice(0, band.rows))
            out, dout_part = (t[rows].transpose(1, 2).contiguous() for t in (result.out, dout))
            state = states[n] if n < len(states) else None
            parts = self._call_backward(
                dout_part, part_q, part_k, part_v, out, result.lse[rows].contiguous(), spec, band, state
            )
            for grad, part, count in zip(grads, parts, (band.rows, band.keys, band.keys), strict=True):
                grad[band.batch, :, :count] = part.transpose(1, 2)
        return grads[0], grads[1], grads[2]

    @staticmethod
    def _bands(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int, key_start: int) -> list[Band]:
        queries = range(query_start, query_start + q.shape[2])
        keys = range(key_start, key_start + k.shape[2])
        return list(bands(spec, q.shape[0], queries, keys))

    @staticmethod
    def _inputs(band: Band, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = q[band.batch, :, : band.rows].transpose(1, 2)
        k, v = (t[band.batch, :, : band.keys].transpose(1, 2) for t in (k, v))
        return q, k, v

    def _call(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, band: Band) -> tuple[Tensor, Tensor, Any]:
        raise NotImplementedError

    def _call_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
        band: Band,
        state: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError


class AtenFlash(BandedFlash):
    """`aten::_flash_attention_forward`: the flash kernel that PyTorch ships; half precision, head_dim to 256."""

    name = "sdpa"

    def _call(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, band: Band) -> tuple[Tensor, Tensor, Any]:
        causal = band.right == 0 and band.left == -1
        window = {} if causal else {"window_size_left": band.left, "window_size_right": band.right}
        out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], spec.dropout, causal, False, scale=spec.scale, **window
        )
        return out, lse, (seed, offset)

    def _call_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
        band: Band,
        state: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        causal = band.right == 0 and band.left == -1
        window = {} if causal else {"window_size_left": band.left, "window_size_right": band.right}
        empty = torch.empty(0, dtype=torch.int32, device=q.device)
        seed, offset = state if state is not None else (empty, empty)
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[1], k.shape[1], spec.dropout, causal, seed, offset,
            scale=spec.scale, **window,
        )  # fmt: skip


class FlashAttn(BandedFlash):
    """The flash-attn package (2.7 or later), half precision on CUDA.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """

    name = "flash_attn"

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface

        self._interface = flash_attn_interface

    def _call(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, band: Band) -> tuple[Tensor, Tensor, Any]:
        out, lse, _, state = self._interface._flash_attn_forward(
            q, k, v, spec.dropout, self._scale(q, spec), causal=band.right == 0 and band.left == -1,
            window_size_left=band.left, window_size_right=band.right, softcap=0.0, alibi_slopes=None,
            return_softmax=False,
        )  # fmt: skip
        return out, lse, state

    def _call_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        spec: AttentionSpec,
        band: Band,
        state: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self._interface._flash_attn_backward(
            dout, q, k, v, out, lse, dq, dk, dv, spec.dropout, self._scale(q, spec), band.right == 0 and band.left == -1,
            band.left, band.right, 0.0, None, False, rng_state=state,
        )  # fmt: skip
        return dq, dk, dv

    @staticmethod
    def _scale(q: Tensor, spec: AttentionSpec) -> float:
        return q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
