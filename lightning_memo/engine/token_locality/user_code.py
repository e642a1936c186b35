"""Code of a user that a run on fake tensors does not show: hooks on modules and parameters, and backward functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import copy_context
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from lightning_memo.engine.state.other_generators import OtherGenerators
from lightning_memo.engine.state.python_state import PythonState
from lightning_memo.engine.state.user_hooks import GLOBAL_HOOKS, hook_tables, hooks_of_users
from lightning_memo.engine.state.user_objects import home_of, is_of_a_library
from lightning_memo.engine.token_locality.token_dims import TokensMixed


def hooked_module(layer: nn.Module) -> str:
    """Return the name of a module inside a layer on which a user has registered hooks; empty if there is none."""
    if hooks_of_users(GLOBAL_HOOKS):
        return "all modules"
    for name, module in layer.named_modules():
        if module is not layer and has_hooks(module):
            return name
    return ""


def has_hooks(module: nn.Module) -> bool:
    """Return whether a user has registered hooks on a module."""
    return bool(hooks_of_users(hook_tables(module)))


def without_hooks(layer: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context without a user's hooks on modules inside a layer: they may keep what they see."""
    tables = [table for module in layer.modules() if module is not layer for table in hook_tables(module)]
    return _without(tables, lambda hook: not is_of_a_library(hook))


def without_parameter_hooks(layer: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context without hooks on the parameters of a layer: they are to see whole gradients only."""
    return _without([p._backward_hooks for p in layer.parameters() if p._backward_hooks], lambda hook: True)


def without_global_hooks() -> contextlib.AbstractContextManager[None]:
    """Return a context without hooks that libraries call for all modules: PyTorch's counters of FLOPs keep tensors."""
    return _without(GLOBAL_HOOKS[:2], is_of_a_library)


@contextlib.contextmanager
def _without(tables: Sequence[dict[int, Any]], leaves_out: Callable[[Any], bool]) -> Iterator[None]:
    """Inside this context, some of the hooks in the tables are not called."""
    before = [(table, dict(table)) for table in tables if any(map(leaves_out, table.values()))]
    try:
        for table, hooks in before:
            for number in [number for number, hook in hooks.items() if leaves_out(hook)]:
                del table[number]
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


@contextlib.contextmanager
def refusing_python_draws(layer: nn.Module, state: PythonState) -> Iterator[None]:
    """Refuse a proof of code that draws numbers outside of torch or sets context variables; undo the draws.

    Args:
        layer: The layer.
        state: What its modules and arguments hold.

    Raises:
        TokensMixed: The layer does so: another number may lead it another way, and each slice would set the variable.
    """
    generators, variables = OtherGenerators.of(layer, state), copy_context()
    try:
        yield
        if drawn := [g for g in generators.drawn() if not isinstance(g, torch.Generator)]:
            raise TokensMixed(f"draws numbers of {type(drawn[0]).__module__}.{type(drawn[0]).__name__}")
        if any(value is not variables.get(variable) for variable, value in copy_context().items()):
            raise TokensMixed("sets a context variable")
    finally:
        generators.restore()


def hooked_parameter(model: nn.Module) -> str:
    """Return the name of a parameter on which a user has registered hooks; empty if there is none."""
    for name, p in model.named_parameters():
        for table in (p._backward_hooks, getattr(p, "_post_accumulate_grad_hooks", None)):
            if table and any(home_of(hook) != "torch" for hook in table.values()):
                return name
    return ""


def has_custom_functions(t: Tensor) -> bool:
    """Return whether a tensor was computed by autograd functions of a user, whose backward may do anything."""
    nodes, seen = [t.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None) if isinstance(node, BackwardCFunction) else None
        if function is not None and not is_of_a_library(function):
            return True
        nodes += [following for following, _ in node.next_functions]
    return False


def trial_error(error: Exception) -> str:
    """Return why a run on fake tensors that ended with an error proves nothing."""
    if isinstance(error, TokensMixed):
        return str(error)
    if "Cannot access data pointer" in str(error):
        return "it runs a kernel of its own, of Triton or of an extension, which may relate any tokens"
    return f"a trial run with other numbers of tokens, and without values, ended with: {first_line(error)}"


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or its type."""
    return (str(error).splitlines() or [""])[0].rstrip(".") or type(error).__name__
