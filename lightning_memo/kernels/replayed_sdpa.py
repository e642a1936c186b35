"""Attention for calls that no flash kernel computes: PyTorch's attention, run again in the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_memo.kernels.attention_kernel import AttentionResult, AttentionSpec, block_mask, token_major
from lightning_memo.kernels.rng_state import RngState
from lightning_memo.utils.around_forward import without_saved_tensors_hooks

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
