"""TransformerEngine's fused attention, with explicit log-sum-exp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import AttentionResult, AttentionSpec
from lightning_memo.kernels.flash_attention import LONGEST_OF_SLOWER, AtenFlash
from lightning_memo.kernels.packages.kernel_packages import TRANSFORMER_ENGINE

_LAYOUT = "bshd_bshd_bshd"
_BACKEND = "F16_arbitrary_seqlen"
# From this release on, the layouts of outputs and gradients are arguments, and the dtype of gradients is not.
_LAYOUTS_OF_OUTPUTS = (2, 15)
_LARGEST_HEAD = 128
_LARGEST_HEAD_ON_HOPPER = 256


class TransformerEngineAttention(AtenFlash):
    """TransformerEngine's `fused_attn_fwd` and `fused_attn_bwd`: cuDNN's kernels for half precision.

    A causal mask is aligned at the last query and the last key, as the attention of a slice needs it. Windows, padded
    batches and unsupported head sizes are passed on to PyTorch's flash kernel.

    Raises:
        ValueError: The package is not installed, or its version is not supported.
    """

    name = "transformer_engine"
    longest_joined = LONGEST_OF_SLOWER

    def __init__(self) -> None:
        TRANSFORMER_ENGINE.check(self.name)
        import transformer_engine.pytorch  # noqa: F401  (loads the extension that the next module needs)
        from transformer_engine.pytorch import constants
        from transformer_engine.pytorch.cpp_extensions import fused_attn

        self._module, self._types = fused_attn, constants.TE_DType
        self._with_layouts = (TRANSFORMER_ENGINE.release() or (0, 0)) >= _LAYOUTS_OF_OUTPUTS

    @staticmethod
    def serves(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0) -> bool:
        queries, keys, head = q.shape[2], k.shape[2], q.shape[3]
        if spec.window is not None or spec.lengths is not None:
            return False
        if spec.causal:
            ends_together = query_start + queries == key_start + keys
            if queries > keys or not ends_together or (queries < keys and spec.dropout):
                return False
        return head <= _LARGEST_HEAD or (head <= _LARGEST_HEAD_ON_HOPPER and _is_hopper(q.device))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        if not self.serves(q, k, spec, query_start, key_start):
            return super().forward(q, k, v, spec, query_start, key_start)
        out, (lse, rng_state, *_) = self._module.fused_attn_fwd(
            True, *_lengths(q, k), *map(_token_major, (q, k, v)), q.dtype, self._module.FusedAttnBackend[_BACKEND],
            # The kernel draws random numbers even without dropout. They must not come from the model's generator.
            rng_gen=None if spec.dropout else torch.Generator(q.device),
            **({"o_format": "bshd"} if self._with_layouts else {}),
            **_mask(q, k, spec),
        )  # fmt: skip
        return AttentionResult(out.transpose(1, 2), lse.reshape(q.shape[:3]), rng_state)

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
        if self._with_layouts:
            formats = {"o_format": "bshd", "do_format": "bshd", "dqkv_layout": _LAYOUT}
        else:
            formats = {"dqkv_dtype": self._types[q.dtype]}
        dq, dk, dv, *_ = self._module.fused_attn_bwd(
            *_lengths(q, k), *map(_token_major, (q, k, v, result.out, dout)), q.dtype,
            aux_ctx_tensors=[result.lse.unsqueeze(-1).contiguous(), result.state],
            fused_attention_backend=self._module.FusedAttnBackend[_BACKEND], **formats, **_mask(q, k, spec),
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _mask(q: Tensor, k: Tensor, spec: AttentionSpec) -> dict[str, Any]:
    """Return the mask arguments, which are the same in forward and backward."""
    kind = "no_mask"
    if spec.causal:
        kind = "causal" if q.shape[2] == k.shape[2] else "causal_bottom_right"
    return {
        "attn_scale": spec.scale,
        "dropout": spec.dropout,
        "qkv_layout": _LAYOUT,
        "attn_bias_type": "no_bias",
        "attn_mask_type": kind,
        "window_size": (-1, 0 if spec.causal else -1),
    }


def _lengths(q: Tensor, k: Tensor) -> tuple[int, int, Tensor, Tensor]:
    """Return the numbers of queries and of keys, and the cumulative sequence lengths of both, int32 `[batch + 1]`."""
    edges = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    return q.shape[2], k.shape[2], edges * q.shape[2], edges * k.shape[2]


def _token_major(t: Tensor) -> Tensor:
    """Return a contiguous copy as `[batch, tokens, heads, head_dim]`, because the kernels ignore strides."""
    return t.transpose(1, 2).contiguous()
