"""Compiled code (`torch.compile`) rests where the engine runs a model's own code slice by slice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn


def rest_compiled(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[str], list[Callable[[], None]]]:
    """Make layers, what is in them, and what they are in, run as they were written.

    A compiled layer would take the engine for a part of it: its hooks, its modes and its attention. What is compiled
    beside the layers stays so.

    Args:
        model: What the layers belong to.
        layers: Run by the engine.

    Returns:
        Names of what was compiled, and what compiles it again.
    """
    inside = {module for layer in layers for module in layer.modules()}
    names, undo = [], []
    for name, module in model.named_modules():
        if module in inside or not inside.isdisjoint(module.modules()):
            undone = list(_rest(module))
            names += [name or type(module).__name__] * bool(undone)
            undo += undone
    return names, undo


def _rest(module: nn.Module) -> Iterator[Callable[[], None]]:
    if module._compiled_call_impl is not None:  # by module.compile()
        yield functools.partial(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
        module._compiled_call_impl = None
    original = module._modules.get("_orig_mod")
    if original is not None and hasattr(module, "dynamo_ctx"):  # by torch.compile(module)
        yield functools.partial(setattr, module, "forward", module.forward)
        module.forward = _as_written(original)


def _as_written(module: nn.Module) -> Callable[..., Any]:
    @functools.wraps(module.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return forward
