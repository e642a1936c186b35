"""Kernels of Triton on a CPU, run by its interpreter. Importing it needs triton, and `TRITON_INTERPRET=1`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

_convert, _call, _cast = interpreter._implicit_cvt, interpreter.GridExecutor.__call__, interpreter._convert_float


def _convert_floats(value: Any) -> Any:
    if not isinstance(value, float):
        return _convert(value)
    return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)


def _call_unseen(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel, whose writes PyTorch does not see on a GPU. The interpreter copies all arguments back."""
    tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
    with _disable_current_modes(), torch.autograd._unsafe_preserve_version_counter(tuple(tensors)):
        return _call(executor, *args, **kwargs)


def _cast_rounded(data: Any, given: Any, wanted: Any, mode: Any) -> Any:
    if (given, wanted) != (tl.float32, tl.bfloat16):
        return _cast(data, given, wanted, mode)
    return torch.from_numpy(data.copy()).bfloat16().view(torch.int16).numpy().view(np.uint16)


@contextlib.contextmanager
def interpreted() -> Iterator[pytest.MonkeyPatch]:
    """Inside, kernels of Triton run on the CPU.

    The interpreter lacks numbers with a fraction among a kernel's arguments, which kernels cast; it cuts off what bf16
    has no bits for, where GPUs round; and it writes to all arguments.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", _call_unseen)
        patch.setattr(interpreter, "_implicit_cvt", _convert_floats)
        patch.setattr(interpreter, "_convert_float", _cast_rounded)
        yield patch
