"""liger-kernel on a CPU, run by Triton's interpreter. Importing it needs both packages, and `TRITON_INTERPRET=1`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import triton
import triton.language as tl
from liger_kernel.ops import rms_norm
from transformers.models.llama import modeling_llama

from support.kernels import triton_interpreter


@triton.jit
def _rsqrt(x):
    return 1.0 / tl.sqrt(x)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside, liger's kernels run on the CPU, and Llamas may be changed: all is put back.

    The interpreter lacks the GPU's own `rsqrt`.
    """
    with triton_interpreter.interpreted() as patch:
        patch.setattr(rms_norm, "rsqrt", _rsqrt)
        for name, value in vars(modeling_llama).items():
            patch.setitem(vars(modeling_llama), name, value)
        yield
