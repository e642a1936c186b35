"""Which attention kernel serves a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_memo.artifacts.swap_plan import Attention
from lightning_memo.kernels.attention_kernel import AttentionBackend, AttentionSpec, Kernel
from lightning_memo.kernels.banded import AtenFlash, FlashAttn
from lightning_memo.kernels.cpu import CpuFlash
from lightning_memo.kernels.cudnn import CudnnSdpa
from lightning_memo.kernels.kernel_packages import FLASH_ATTN, TRANSFORMER_ENGINE
from lightning_memo.kernels.packed_documents import PackedDocuments
from lightning_memo.kernels.replay import Replay
from lightning_memo.kernels.transformer_engine import TransformerEngineAttention

_FLASH = 1  # at::SDPBackend::flash_attention
_PACKAGES = {"flash_attn": FLASH_ATTN, "transformer_engine": TRANSFORMER_ENGINE}
# The first one is PyTorch's own; the others do no worse where they leave a call to it.
KERNELS: dict[str, dict[Attention, type[Kernel]]] = {
    "cpu": {"sdpa": CpuFlash},
    "cuda": {
        "sdpa": AtenFlash,
        "cudnn": CudnnSdpa,
        "flash_attn": FlashAttn,
        "transformer_engine": TransformerEngineAttention,
    },
}
"""Kernels of each type of device."""

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

    Where the kernel of that name cannot compute the call (its head size, dtype, mask or dropout), PyTorch's own
    attention is replayed instead, which is right but slower. "auto" is PyTorch's own kernel: which one is the fastest
    is found out by trying, once, see `probe.py`. Packed documents are computed one by one, or replayed with a mask.
    """
    backend = _select(q, k, v, spec, choice)
    return PackedDocuments(backend) if spec.documents is not None and backend.blocks else backend


def candidates(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> dict[Attention, Callable[[], AttentionBackend]]:
    """Makers of the kernels that compute such calls themselves, whatever a batch's padding, documents and windows.

    Where there is none, PyTorch's attention is replayed. A maker raises `ValueError` where the package is of a version
    that is not known here.
    """
    spec = replace(spec, window=None, lengths=None, documents=None)
    if isinstance(_select(q, k, v, spec, "auto"), Replay):
        return {}
    return {
        name: functools.partial(_make, name, kind)
        for name, kind in _kernels_of(q.device).items()
        if (name not in _PACKAGES or _PACKAGES[name].release() is not None) and kind.serves(q, k, spec)
    }


def _make(name: str, kind: type[Kernel]) -> AttentionBackend:
    check_available(name)
    return kind()


def _select(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, choice: str) -> AttentionBackend:
    serves = _cpu_flash_serves if q.device.type == "cpu" else _flash_serves
    if not serves(q, k, v, spec):
        return Replay()
    kernels: Mapping[str, type[Kernel]] = _kernels_of(q.device)
    return kernels.get(choice, kernels["sdpa"])()


def _kernels_of(device: torch.device) -> dict[Attention, type[Kernel]]:
    return KERNELS["cpu" if device.type == "cpu" else "cuda"]


def _flash_serves(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
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
