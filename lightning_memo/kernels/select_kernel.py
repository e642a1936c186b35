"""Selection of the attention kernel that computes a call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_memo.artifacts.swap_plan import Attention
from lightning_memo.kernels.attention_kernel import (
    AttentionBackend,
    AttentionResult,
    AttentionSpec,
    Kernel,
    token_major,
)
from lightning_memo.kernels.blockwise_attention import BlockwiseAttention
from lightning_memo.kernels.cpu_flash import CpuFlash
from lightning_memo.kernels.cudnn import CudnnSdpa
from lightning_memo.kernels.divided_calls import DividedCalls, PackedDocuments, is_too_large
from lightning_memo.kernels.flash_attention import AtenFlash
from lightning_memo.kernels.kernel_packages import (
    FLASH_ATTN,
    FLASH_ATTN_3,
    FLASH_ATTN_4,
    TRANSFORMER_ENGINE,
    FlashAttn,
    FlashAttn3,
    FlashAttn4,
    TransformerEngineAttention,
)
from lightning_memo.kernels.replayed_sdpa import Replay

_PACKAGES = {
    "flash_attn": FLASH_ATTN, "flash_attn_3": FLASH_ATTN_3, "flash_attn_4": FLASH_ATTN_4,
    "transformer_engine": TRANSFORMER_ENGINE,
}  # fmt: skip
# The first kernel is PyTorch's own. The others pass a call on to it if they do not compute it themselves.
KERNELS: dict[str, dict[Attention, type[Kernel]]] = {
    "cpu": {"sdpa": CpuFlash},
    "cuda": {
        "sdpa": AtenFlash,
        "cudnn": CudnnSdpa,
        "flash_attn": FlashAttn,
        "flash_attn_3": FlashAttn3,
        "flash_attn_4": FlashAttn4,
        "transformer_engine": TransformerEngineAttention,
    },
}
"""Kernels of each device type, by name."""
_FIRST_WITH_FLASH = (8, 0)  # the first compute capability with flash attention
_LARGEST_HEAD = 256


def check_available(choice: str) -> None:
    """Check that the package of a kernel is installed in a supported version.

    Raises:
        ValueError: See :meth:`Package.check`.
    """
    if choice in _PACKAGES:
        _PACKAGES[choice].check(choice)


def select_backend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, choice: str = "auto") -> AttentionBackend:
    """Return the kernel for an attention call.

    If no flash kernel can compute the call because of its head size, dtype, mask or dropout, PyTorch's attention is
    replayed in the backward, which is correct but slower. Calls with a cap are computed blockwise, and so are calls
    with sinks that no flash kernel can compute. Packed documents are computed one by one, or replayed with a mask.
    Calls of more than 2^31 elements are divided.

    Args:
        q: Queries, `[batch, heads, tokens, head_dim]`.
        k: Keys.
        v: Values.
        spec: The keys that each query sees.
        choice: Name of the kernel. "auto" is PyTorch's own kernel; the fastest one is found by trials, see
            `time_kernels.py`.
    """
    backend = _select(q, k, v, spec, choice)
    is_flash = q.device.type != "cpu" and not isinstance(backend, (Replay, BlockwiseAttention))
    if spec.documents is not None and backend.blocks:
        backend = PackedDocuments(backend)
    return DividedCalls(backend) if is_flash and is_too_large(q, v, spec) else backend


def candidate_kernels(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
) -> dict[Attention, Callable[[], AttentionBackend]]:
    """Return factories of the kernels that compute such calls themselves, whatever the padding, documents and window.

    There are none if PyTorch's attention is replayed or computed blockwise. A factory raises `ValueError` if the
    version of the kernel's package is not supported.
    """
    spec = replace(spec, window=None, lengths=None, documents=None)
    if isinstance(_select(q, k, v, spec, "auto"), (Replay, BlockwiseAttention)):
        return {}
    padded = q.shape[-1] != v.shape[-1]
    if padded:
        q, k, v, spec = _padded_heads(q, k, v, spec)
    return {
        name: functools.partial(_make, name, kind, padded)
        for name, kind in _kernels_of(q.device).items()
        if (name not in _PACKAGES or _PACKAGES[name].release() is not None) and kind.serves(q, k, spec)
    }


def _make(name: str, kind: type[Kernel], padded: bool) -> AttentionBackend:
    check_available(name)
    return _PaddedHeads(kind()) if padded else kind()


def _select(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, choice: str) -> AttentionBackend:
    serves = _cpu_flash_serves if q.device.type == "cpu" else _flash_serves
    if spec.softcap is not None:
        return BlockwiseAttention()
    if q.shape[-1] != v.shape[-1] and serves(*_padded_heads(q, k, v, spec)):
        return _PaddedHeads(_select(*_padded_heads(q, k, v, spec), choice))
    if not serves(q, k, v, spec):
        return Replay() if spec.sinks is None else BlockwiseAttention()
    kernels: Mapping[str, type[Kernel]] = _kernels_of(q.device)
    return kernels.get(choice, kernels["sdpa"])()


def _kernels_of(device: torch.device) -> dict[Attention, type[Kernel]]:
    return KERNELS["cpu" if device.type == "cpu" else "cuda"]


def _flash_serves(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Return whether a call fulfils the conditions of all CUDA kernels."""
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
    """Return whether PyTorch's flash kernel computes a call, whatever `sdpa_kernel` allows around the model.

    Forwards and backwards need not run in the same context, and slices need a kernel that takes blocks.
    """
    grouped = q.shape[1] != k.shape[1]
    mask = spec.mask
    causal = spec.causal and mask is None
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        picked = torch._fused_sdp_choice(q, k, v, mask, spec.dropout, causal, scale=spec.scale, enable_gqa=grouped)
    return picked == SDPBackend.FLASH_ATTENTION.value


def _padded_heads(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor, Tensor, AttentionSpec]:
    """Return the call with zeros at the end of each head, such that all heads have the same size."""
    size = max(q.shape[-1], v.shape[-1])
    scale = q.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    return _padded(q, size), _padded(k, size), _padded(v, size), replace(spec, scale=scale)


def _padded(t: Tensor, size: int) -> Tensor:
    return t if t.shape[-1] == size else F.pad(t, (0, size - t.shape[-1]))


class _PaddedHeads:
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
        result = self._inner.forward(*_padded_heads(q, k, v, spec), query_start, key_start)
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
        *padded, spec_of_all = _padded_heads(q, k, v, spec)
        grads = self._inner.backward(_padded(dout, size), *padded, result, spec_of_all, query_start, key_start)
        dq, dk, dv = (grad[..., : t.shape[-1]] for grad, t in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv
