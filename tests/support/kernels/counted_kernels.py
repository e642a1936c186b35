"""Triton's kernels of feed-forwards and rotary positions: how often they run, and what they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor


def count_kernels(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Return the numbers of calls from now on, by function."""
    from lightning_memo.kernels import triton_kernels

    counts = Counter[str]()

    def counted(name: str) -> Callable[..., Any]:
        kernel = getattr(triton_kernels, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return kernel(*args, **kwargs)

        return run

    for name in ("gated", "gated_gradients", "rotated"):
        patch.setattr(triton_kernels, name, counted(name))
    return counts


def assert_near(function: Callable[..., Any], exact: Callable[..., Any], inputs: Sequence[Tensor]) -> None:
    """Compare the results of a function, and their gradients, with those of another one in fp64."""
    dtype = inputs[0].dtype
    found = _with_gradients(function, inputs)
    right = _with_gradients(exact, [t.double() for t in inputs])
    for t, expected in zip(found, right, strict=True):
        assert t.dtype == dtype
        assert float((t - expected).norm() / expected.norm()) <= torch.finfo(dtype).eps


def _with_gradients(function: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    given = [t.detach().requires_grad_() for t in inputs]
    results = function(*given)
    results = results if isinstance(results, tuple) else (results,)
    generator = torch.Generator().manual_seed(5)
    # Rounded to half precision, which both have.
    gradients = [torch.randn(y.shape, generator=generator).bfloat16().to(y) for y in results]
    return *results, *torch.autograd.grad(results, given, gradients)
