"""liger-kernel on a CPU, run by Triton's interpreter. Importing it needs both packages, and `TRITON_INTERPRET=1`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from liger_kernel.ops import rms_norm
from torch.utils._python_dispatch import _disable_current_modes
from transformers.models.llama import modeling_llama
from triton.runtime import interpreter

_convert, _call = interpreter._implicit_cvt, interpreter.GridExecutor.__call__


@triton.jit
def _rsqrt(x):
    return 1.0 / tl.sqrt(x)


def _convert_floats(value: Any) -> Any:
    if not isinstance(value, float):
        return _convert(value)
    return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)


def _call_unseen(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel, whose writes PyTorch does not see on a GPU. The interpreter copies all arguments back."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    with _disable_current_modes(), torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
        return _call(executor, *args, **kwargs)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Inside, liger's kernels run on the CPU, and Llamas may be changed: all is put back.

    The interpreter lacks numbers with a fraction among a kernel's arguments, which kernels cast, and the GPU's own
    `rsqrt`; and it writes to all arguments.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", _call_unseen)
        patch.setattr(interpreter, "_implicit_cvt", _convert_floats)
        patch.setattr(rms_norm, "rsqrt", _rsqrt)
        for name, value in vars(modeling_llama).items():
            patch.setitem(vars(modeling_llama), name, value)
        yield
