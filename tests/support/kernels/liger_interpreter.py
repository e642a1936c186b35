"""liger-kernel on a CPU, run by Triton's interpreter. Importing it needs both packages, and `TRITON_INTERPRET=1`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton
import triton.language as tl
from liger_kernel.ops import rms_norm
from transformers.models.llama import modeling_llama
from triton.runtime import interpreter

_convert = interpreter._implicit_cvt


@triton.jit
def _rsqrt(x):
    return 1.0 / tl.sqrt(x)


def _convert_floats(value: Any) -> Any:
    if not isinstance(value, float):
        return _convert(value)
    return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside, liger's kernels run on the CPU, and Llamas may be changed: all is put back.

    Two things are missing in the interpreter: numbers with a fraction among a kernel's arguments, which kernels cast,
    and the GPU's own `rsqrt`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_implicit_cvt", _convert_floats)
        patch.setattr(rms_norm, "rsqrt", _rsqrt)
        for name, value in vars(modeling_llama).items():
            patch.setitem(vars(modeling_llama), name, value)
        yield
