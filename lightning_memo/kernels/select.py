"""Which attention kernel serves a call."""

from __future__ import annotations

import importlib.util

import torch
from lightning_memo.kernels.transformer_engine import TransformerEngineAttention
from torch import Tensor

from lightning_memo.kernels.attention import AttentionBackend, AttentionSpec
from lightning_memo.kernels.banded import AtenFlash, FlashAttn
from lightning_memo.kernels.cpu import CpuFlash
from lightning_memo.kernels.cudnn import CudnnSdpa
from lightning_memo.kernels.replay import Replay

_FLASH = 1  # at::SDPBackend::flash_attention
_PACKAGES = {"flash_attn": "flash_attn", "transformer_engine": "transformer_engine"}
_OPTIONAL = {"flash_attn": FlashAttn, "transformer_engine": TransformerEngineAttention, "cudnn": CudnnSdpa}


def check_available(choice: str) -> None:
    """Refuse a back end whose package is not installed.

    Raises:
        ValueError: With the name of the extra to install.
    """
    package = _PACKAGES.get(choice)
    if package is not None and importlib.util.find_spec(package) is None:
        extra = {"flash_attn": "flash", "transformer_engine": "te"}[choice]
        raise ValueError(
            f'attention="{choice}" needs the package {package}, which is not installed: '
            f'pip install "lightning_memo[{extra}]", or use attention="auto"'
        )


def select_backend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, choice: str = "auto") -> AttentionBackend:
    """The kernel for queries, keys and values `[batch, heads, tokens, head_dim]`.

    `choice` is a wish: where that kernel cannot compute the call (its head size, dtype, mask or dropout), PyTorch's own
    attention is replayed instead, which is right but slower.
    """
    if q.device.type == "cpu":
        return CpuFlash() if _cpu_flash_serves(q, k, v, spec) else Replay()
    half = q.dtype in (torch.float16, torch.bfloat16)
    if not half or spec.mask is not None or q.shape[-1] != v.shape[-1] or q.shape[-1] > 256:
        return Replay()
    if choice in _OPTIONAL:
        return _OPTIONAL[choice]()
    return AtenFlash()


def _cpu_flash_serves(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    grouped = q.shape[1] != k.shape[1]
    mask = spec.mask
    causal = spec.causal and mask is None
    picked = torch._fused_sdp_choice(q, k, v, mask, spec.dropout, causal, scale=spec.scale, enable_gqa=grouped)
    return picked == _FLASH
