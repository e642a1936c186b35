"""Kernels for calls that no flash kernel computes: scores in plain operations, and PyTorch's attention, run again."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_memo.kernels.attention_kernel import (
    AttentionResult,
    AttentionSpec,
    block_mask,
    finite,
    repeat_heads,
    sum_head_groups,
    sums_dtype,
    token_major,
)
from lightning_memo.kernels.rng_state import RngState
from lightning_memo.utils.around_forward import without_saved_tensors_hooks


class BlockwiseAttention:
    """Computes scores with a cap, and all masks; it returns the log-sum-exp for calls with sinks.

    The scores of a few queries are on the device at a time. The backward computes them again.
    """

    name = "blockwise"
    blocks = True
    # Number of scores that are computed at a time.
    scores = 1 << 22

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        groups = q.shape[1] // k.shape[1]
        k, v = repeat_heads(k, groups), repeat_heads(v, groups)
        out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        lse = q.new_full(q.shape[:3], -math.inf, dtype=sums_dtype(q))
        for rows, keys in self._chunks(q, k, spec, query_start, key_start):
            scores, _ = _scores(q, k, rows, keys, spec, query_start, key_start)
            lse[:, :, rows] = torch.logsumexp(scores, -1)
            weights = torch.exp(scores.sub_(finite(lse[:, :, rows])[..., None]))
            out[:, :, rows] = weights.to(v.dtype) @ v[:, :, keys]
        return AttentionResult(out, lse)

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
        groups = q.shape[1] // k.shape[1]
        k, v = repeat_heads(k, groups), repeat_heads(v, groups)
        sums, scale, lse = sums_dtype(q), _scale(q, spec), finite(result.lse)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=sums), torch.zeros_like(v, dtype=sums)
        for rows, keys in self._chunks(q, k, spec, query_start, key_start):
            scores, slopes = _scores(q, k, rows, keys, spec, query_start, key_start)
            weights = torch.exp(scores.sub_(lse[:, :, rows, None]))
            part = dout[:, :, rows]
            dv[:, :, keys] += weights.to(v.dtype).transpose(2, 3) @ part
            products = (part.to(sums) * result.out[:, :, rows]).sum(-1, keepdim=True)
            dscores = weights.mul_((part @ v[:, :, keys].transpose(2, 3)).to(sums).sub_(products))
            dscores = (dscores if slopes is None else dscores.mul_(slopes)).mul_(scale).to(q.dtype)
            dq[:, :, rows] = dscores @ k[:, :, keys]
            dk[:, :, keys] += dscores.transpose(2, 3) @ q[:, :, rows]
        return token_major(dq), sum_head_groups(dk, groups).to(k.dtype), sum_head_groups(dv, groups).to(v.dtype)

    def _chunks(
        self, q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int, key_start: int
    ) -> Iterator[tuple[slice, slice]]:
        """Iterate over ranges of queries, with the keys that they can see."""
        queries, keys = q.shape[2], k.shape[2]
        rows = max(self.scores // max(q.shape[0] * q.shape[1] * keys, 1), 1)
        for first in range(0, queries, rows):
            last, low, high = min(first + rows, queries), 0, keys
            if spec.mask is None and spec.causal:
                high = max(min(query_start + last - key_start, keys), 0)
            if spec.mask is None and spec.window is not None:
                low = max(query_start + first - spec.window + 1 - key_start, 0)
            if low < high:
                yield slice(first, last), slice(low, high)


def _scale(q: Tensor, spec: AttentionSpec) -> float:
    return float(q.shape[-1] ** -0.5 if spec.scale is None else spec.scale)


def _scores(
    q: Tensor, k: Tensor, rows: slice, keys: slice, spec: AttentionSpec, query_start: int, key_start: int
) -> tuple[Tensor, Tensor | None]:
    """Return the scores of some queries and keys, and the derivative of the cap; `None` without a cap."""
    scores = (q[:, :, rows] @ k[:, :, keys].transpose(2, 3)).to(sums_dtype(q)) * _scale(q, spec)
    slopes = None
    if spec.softcap is not None:
        capped = scores.div_(spec.softcap).tanh_()
        slopes = 1 - capped.square()
        scores = capped * spec.softcap
    mask = spec.mask
    if mask is not None:
        mask = mask[..., rows, :] if mask.shape[-2] > 1 else mask
    else:
        of_queries = range(query_start + rows.start, query_start + rows.stop)
        of_keys = range(key_start + keys.start, key_start + keys.stop)
        mask, aligned = block_mask(spec, q.shape[0], of_queries, of_keys, q.device, flag_with_mask=False)
        if aligned:
            mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return scores, slopes
    return scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores.add_(mask), slopes


# The engine replaces `F.scaled_dot_product_attention` while layers run; this is PyTorch's own function.
_sdpa = torch._C._nn.scaled_dot_product_attention
_ENABLED: Final = {
    SDPBackend.MATH: cuda.math_sdp_enabled,
    SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled,
}


@dataclass(frozen=True, slots=True)
class _Circumstances:
    """On which the result of a call depends: the random state, and the kernels from which PyTorch selects.

    Kernels draw different dropout masks from the same random state.

    Attributes:
        before: The random state before the call.
        after: The random state after the call.
        kernels: The kernels.
    """

    before: RngState
    after: RngState
    kernels: list[SDPBackend]

    @contextmanager
    def replayed(self, draws: bool) -> Iterator[None]:
        """Restore the circumstances inside this context.

        Args:
            draws: Whether the call draws dropout.

        Raises:
            RuntimeError: Other random numbers were drawn.
        """
        with self.before.replayed() if draws else nullcontext(), sdpa_kernel(self.kernels):
            yield
            if draws:
                self.after.check_repeated("the dropout of attention")


class Replay:
    """Calls `scaled_dot_product_attention`, and replays it in the backward, with the same random state and kernel.

    Results are bit-identical to plain training, including dropout. Neither scores nor probabilities are stored, but
    attention is computed twice. It is used for attention dropout on a CPU, for fp32 on CUDA, and for head sizes that
    flash kernels do not support.
    """

    name = "replay"
    blocks = False

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        before = RngState.capture(q.device)
        out = self._attend(q, k, v, spec)
        kernels = [kernel for kernel, is_enabled in _ENABLED.items() if is_enabled()]
        state = _Circumstances(before, RngState.capture(q.device, before), kernels)
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
        with result.state.replayed(spec.dropout > 0), without_saved_tensors_hooks(), torch.enable_grad():
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
