"""Which attention kernel serves a call."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memo.kernels.attention import AttentionBackend, AttentionSpec
from lightning_memo.kernels.banded import AtenFlash, FlashAttn
from lightning_memo.kernels.cpu import CpuFlash
from lightning_memo.kernels.cudnn import CudnnSdpa
from lightning_memo.kernels.documents import PackedDocuments
from lightning_memo.kernels.packages import FLASH_ATTN, TRANSFORMER_ENGINE
from lightning_memo.kernels.replay import Replay
from lightning_memo.kernels.transformer_engine import TransformerEngineAttention

_FLASH = 1  # at::SDPBackend::flash_attention
_PACKAGES = {"flash_attn": FLASH_ATTN, "transformer_engine": TRANSFORMER_ENGINE}
_OPTIONAL = {"flash_attn": FlashAttn, "transformer_engine": TransformerEngineAttention, "cudnn": CudnnSdpa}
_FIRST_WITH_FLASH = (8, 0)  # compute capability
_LARGEST_HEAD = 256


def check_available(choice: str) -> None:
    """Refuse a back end whose package is missing, or of a version that is not known here.

    Raises:
        ValueError: See :meth:`Package.check`.
    """
    if choice in _PACKAGES:
        _PACKAGES[choice].check(choice)


def select_backend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, choice: str = "auto") -> AttentionBackend:
    """The kernel for queries, keys and values `[batch, heads, tokens, head_dim]`.

    `choice` is a wish: where that kernel cannot compute the call (its head size, dtype, mask or dropout), PyTorch's own
    attention is replayed instead, which is right but slower. Packed documents are computed one by one, or replayed with
    a mask.
    """
    backend = _select(q, k, v, spec, choice)
    return PackedDocuments(backend) if spec.documents is not None and backend.blocks else backend


def _select(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, choice: str) -> AttentionBackend:
    if q.device.type == "cpu":
        return CpuFlash() if _cpu_flash_serves(q, k, v, spec) else Replay()
    if not _flash_serves(q, v, spec):
        return Replay()
    if choice in _OPTIONAL:
        return _OPTIONAL[choice]()
    return AtenFlash()


def _flash_serves(q: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """What all kernels for CUDA ask of a call."""
    head = q.shape[-1]
    return (
        q.dtype in (torch.float16, torch.bfloat16)
        and spec.mask is None
        and head == v.shape[-1]
        and head % 8 == 0
        and head <= _LARGEST_HEAD
        and torch.cuda.get_device_capability(q.device) >= _FIRST_WITH_FLASH
    )


def _cpu_flash_serves(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    grouped = q.shape[1] != k.shape[1]
    mask = spec.mask
    causal = spec.causal and mask is None
    picked = torch._fused_sdp_choice(q, k, v, mask, spec.dropout, causal, scale=spec.scale, enable_gqa=grouped)
    return picked == _FLASH
