"""The kernels of the flash-attn packages: FlashAttention-2, and 3 and 4 for newer GPUs."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import AttentionSpec
from lightning_memo.kernels.document_pieces import DocumentRun
from lightning_memo.kernels.flash_attention import LONGEST_OF_SLOWER, AtenFlash, Band, BandedFlash
from lightning_memo.kernels.packages.kernel_packages import FLASH_ATTN_3, FLASH_ATTN_4, Package


class FlashAttn(BandedFlash):
    """The flash-attn package (2.7 or later), for half precision.

    Raises:
        ModuleNotFoundError: The package is not installed.
    """

    name = "flash_attn"

    def __init__(self) -> None:
        from flash_attn import flash_attn_interface

        self._interface = flash_attn_interface

    def _call(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, band: Band) -> tuple[Tensor, Tensor, Any]:
        out, lse, _, state = self._interface._flash_attn_forward(
            q, k, v, spec.dropout, _scale(q, spec), causal=band.causal, window_size_left=band.left,
            window_size_right=band.right, softcap=0.0, alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return out, lse, state if spec.dropout else None

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
            dout, q, k, v, out, lse, dq, dk, dv, spec.dropout, _scale(q, spec), causal=band.causal,
            window_size_left=band.left, window_size_right=band.right, softcap=0.0, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(), rng_state=state,
        )  # fmt: skip
        return dq, dk, dv

    def _call_run(
        self, q: Tensor, k: Tensor, v: Tensor, run: DocumentRun, starts: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._interface._flash_attn_varlen_forward(
            q, k, v, *starts, *run.longest, 0.0, _scale(q, run.spec), causal=run.causal, window_size_left=run.left,
            window_size_right=run.right, softcap=0.0, alibi_slopes=None, return_softmax=False,
        )  # fmt: skip
        return out, lse

    def _call_run_backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        run: DocumentRun,
        starts: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self._interface._flash_attn_varlen_backward(
            dout, q, k, v, out, lse, dq, dk, dv, *starts, *run.longest, 0.0, _scale(q, run.spec), causal=run.causal,
            window_size_left=run.left, window_size_right=run.right, softcap=0.0, alibi_slopes=None,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv


class _NewerFlash(AtenFlash):
    """Base class of FlashAttention-3 and 4.

    Sliding windows and dropout, for which they have other rules, and larger heads are left to PyTorch's flash kernel.

    Raises:
        ValueError: The package is not installed, or its version is not supported.
    """

    longest_joined = LONGEST_OF_SLOWER
    package: Package
    majors: tuple[int, ...]
    largest_head: int

    def __init__(self) -> None:
        self.package.check(self.name)

    @classmethod
    def serves(cls, q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0) -> bool:
        return cls._computes(q, spec) and torch.cuda.get_device_capability(q.device)[0] in cls.majors

    @classmethod
    def _computes(cls, q: Tensor, spec: AttentionSpec) -> bool:
        return spec.window is None and not spec.dropout and q.shape[-1] <= cls.largest_head

    def _call(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, band: Band) -> tuple[Tensor, Tensor, Any]:
        if not self._computes(q, spec):
            return super()._call(q, k, v, spec, band)
        out, lse = self._run(q, k, v, _scale(q, spec), band.causal)
        return out, lse, None

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
        if not self._computes(q, spec):
            return super()._call_backward(dout, q, k, v, out, lse, spec, band, state)
        return self._run_backward(dout, q, k, v, out, lse, _scale(q, spec), band.causal)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp `[batch, heads, tokens]`."""
        raise NotImplementedError

    def _run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""
        raise NotImplementedError


class FlashAttn3(_NewerFlash):
    """FlashAttention-3 (`torch.ops.flash_attn_3`), for half precision on Hopper."""

    name = "flash_attn_3"
    package, majors, largest_head = FLASH_ATTN_3, (9,), 256

    def __init__(self) -> None:
        super().__init__()
        importlib.import_module("flash_attn_interface")  # which registers the operators
        self._operators = torch.ops.flash_attn_3

    def _run(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._operators.fwd(q, k, v, softmax_scale=scale, is_causal=causal, num_splits=1)
        return out, lse

    def _run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self._operators.bwd(
            dout, q, k, v, out, lse, dq, dk, dv, softmax_scale=scale, is_causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv


class FlashAttn4(_NewerFlash):
    """FlashAttention-4 (`flash_attn.cute`), for half precision on Hopper and Blackwell."""

    name = "flash_attn_4"
    package, majors, largest_head = FLASH_ATTN_4, (9, 10, 11), 128

    def __init__(self) -> None:
        super().__init__()
        self._interface = importlib.import_module("flash_attn.cute.interface")

    def _run(self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
        out, lse, *_ = self._interface._flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)
        return out, lse

    def _run_backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv, *_ = self._interface._flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=scale, causal=causal,
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )  # fmt: skip
        return dq, dk, dv


def _scale(q: Tensor, spec: AttentionSpec) -> float:
    return float(q.shape[-1] ** -0.5) if spec.scale is None else spec.scale
