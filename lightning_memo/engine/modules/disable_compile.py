"""Disables `torch.compile` in modules whose own code the engine runs slice by slice."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any

from torch import nn

from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.python_objects import dict_of


def rest_compiled(
    model: nn.Module, layers: Sequence[nn.Module], everywhere: bool
) -> tuple[list[str], list[Callable[[], None]]]:
    """Make layers, their submodules and the modules around them run as they were written.

    `torch.compile` would trace the engine's hooks, modes and attention as a part of a compiled layer. Other modules
    stay compiled, as long as their inputs are ordinary tensors.

    Args:
        model: The module that contains the layers.
        layers: The layers that the engine runs.
        everywhere: Whether all modules run as they were written: they get hidden states that are on the host.

    Returns:
        The names of the modules that were compiled and of functions in layers that are, and functions that enable
        compilation again. Functions are not replaced: `run_as_written` runs them.
    """
    inside = {module for layer in layers for module in layer.modules()}
    names, undo = [], []
    for name, module in model.named_modules():
        if everywhere or module in inside or not inside.isdisjoint(module.modules()):
            undone = list(_rest(module))
            names += [name or class_name(module)] * bool(undone)
            undo += undone
    functions = {name for module in inside for name in _compiled_functions(module)}
    return names + sorted(functions), undo


def _compiled_functions(module: nn.Module) -> Iterator[str]:
    """Iterate over names of functions that `torch.compile` returned, among a module's attributes and in its forward."""
    forward = inspect.unwrap(type(module).forward)
    known = getattr(forward, "__globals__", {})
    used = [(name, known.get(name)) for name in getattr(getattr(forward, "__code__", None), "co_names", ())]
    for name, value in (*used, *vars(module).items()):
        function = value.__func__ if type(value) is MethodType else value
        if not issubclass(type(value), nn.Module) and "_torchdynamo_orig_callable" in (dict_of(function) or {}):
            yield name


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
