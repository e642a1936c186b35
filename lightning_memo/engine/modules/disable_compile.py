"""Disables `torch.compile` in modules whose own code the engine runs slice by slice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from lightning_memo.utils.class_names import class_name


def rest_compiled(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[str], list[Callable[[], None]]]:
    """Make layers, their submodules and the modules around them run as they were written.

    `torch.compile` would trace the engine's hooks, modes and attention as a part of a compiled layer. Other modules
    stay compiled.

    Args:
        model: The module that contains the layers.
        layers: The layers that the engine runs.

    Returns:
        The names of the modules that were compiled, and functions that enable compilation again.
    """
    inside = {module for layer in layers for module in layer.modules()}
    names, undo = [], []
    for name, module in model.named_modules():
        if module in inside or not inside.isdisjoint(module.modules()):
            undone = list(_rest(module))
            names += [name or class_name(module)] * bool(undone)
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
