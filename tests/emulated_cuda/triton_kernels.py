"""Triton kernels on the emulated device, which cannot run them: operators of `csrc/operators/triton.cpp` stand in.

An operator has the name of its kernel, and takes those of the kernel's arguments that it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import torch


class ReplaceLaunch(MetaPathFinder):
    """Replaces the launch of Triton's kernels when a module that has some is imported, since Triton imports slowly."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name in ("liger_kernel.ops", "lightning_memo.kernels.triton_kernels"):
            from triton.runtime import JITFunction

            JITFunction.run = _launch


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """Run the operator of a kernel: unseen by modes, as launches are, so that none saves or repeats it by itself.

    Raises:
        AttributeError: There is none.
    """
    operator = getattr(torch.ops.emulated_triton, kernel.fn.__name__).default
    named.update(zip(kernel.arg_names, args, strict=False))
    with torch._C._DisableTorchDispatch():
        operator(**{each.name: named[each.name] for each in operator._schema.arguments})
