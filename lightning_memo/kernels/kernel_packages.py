"""Attention kernels of optional packages, flash-attn and TransformerEngine, and their supported versions."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import AttentionResult, AttentionSpec
from lightning_memo.kernels.flash_attention import LONGEST_OF_SLOWER, AtenFlash, Band, BandedFlash, DocumentRun

_LAYOUT = "bshd_bshd_bshd"
_BACKEND = "F16_arbitrary_seqlen"
# From this release on, the layouts of outputs and gradients are arguments, and the dtype of gradients is not.
_LAYOUTS_OF_OUTPUTS = (2, 15)
_LARGEST_HEAD = 128
_LARGEST_HEAD_ON_HOPPER = 256


@dataclass(frozen=True, slots=True)
class Package:
    """An optional package.

    Attributes:
        distribution: Name of the package on PyPI.
        install: What installs it.
        first: First supported release line, `(major, minor)`.
        last: Last supported release line.
    """

    distribution: str
    install: str
    first: tuple[int, int]
    last: tuple[int, int]

    def release(self) -> tuple[int, int] | None:
        """Return the major and minor number of the installed version; `None` if the package is not installed."""
        try:
            version = metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None
        numbers = re.match(r"(\d+)\.(\d+)", version)
        return (int(numbers[1]), int(numbers[2])) if numbers else None

    def check(self, choice: str) -> None:
        """Check that a supported version is installed.

        Args:
            choice: The setting of `attention` that needs the package.

        Raises:
            ValueError: The package is not installed, or its version is not supported.
        """
        release = self.release()
        if release is None:
            raise ValueError(
                f'attention="{choice}" needs the package {self.distribution}, which is not installed: '
                f'{self.install}, or use attention="auto"'
            )
        if not self.first <= release <= self.last:
            first, last, found = (".".join(map(str, numbers)) for numbers in (self.first, self.last, release))
            raise ValueError(
                f'attention="{choice}" supports {self.distribution} {first} to {last}, but {found} is installed: '
                'install a supported version, or use attention="auto"'
            )


# The kernels call functions of these packages that are not public API, so untested release lines are refused.
FLASH_ATTN = Package("flash-attn", 'pip install "lightning_memo[flash]"', first=(2, 7), last=(2, 8))
FLASH_ATTN_3 = Package("flash_attn_3", "build it from hopper/ of Dao-AILab/flash-attention", first=(3, 0), last=(3, 0))
FLASH_ATTN_4 = Package("flash-attn-4", "pip install flash-attn-4", first=(4, 0), last=(4, 0))
TRANSFORMER_ENGINE = Package("transformer-engine", 'pip install "lightning_memo[te]"', first=(2, 0), last=(2, 20))


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
