"""What surrounds a forward: hooks of saved tensors, and autograd functions that run the forward again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import _python_dispatch
from torch.utils.checkpoint import CheckpointFunction, _checkpoint_hook, _recomputation_hook

_hooks = torch._C._autograd


def why_without_hooks() -> str:
    """Return why no hooks can be set, as the text of `disable_saved_tensors_hooks` or of `torch.func.grad`.

    Empty if they can.
    """
    return _hooks._saved_tensors_hooks_get_disabled_error_message() or ""


def saves_on_cpu() -> bool:
    """Return whether the innermost hooks are those of `save_on_cpu`, which keep the values of saved tensors."""
    return _packs_for(save_on_cpu)


def has_user_hooks() -> bool:
    """Return whether the innermost hooks may read or change saved tensors: they are none of PyTorch's own."""
    return _pack_hook() is not None and not _packs_for(save_on_cpu, _checkpoint_hook, _recomputation_hook)


def is_in_backward() -> bool:
    """Return whether a backward runs in this thread."""
    return torch._C._current_graph_task_id() != -1


def is_checkpointed() -> bool:
    """Return whether `torch.utils.checkpoint` runs what runs now, and is going to run it again in the backward."""
    if torch.is_grad_enabled():
        return _packs_for(_checkpoint_hook)
    return any(function is CheckpointFunction for function in _running_functions())


def is_watched() -> bool:
    """Return whether what runs now has to save what it saves in plain training, and cannot be deferred.

    Hooks of a user read or change what is saved. Activation checkpointing runs the same operations again, and takes
    what leaves an autograd function for its output.
    """
    return is_in_backward() or _packs_for(_checkpoint_hook) or has_user_hooks() or any(_running_functions())


@contextlib.contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Keep hooks, which belong to the graph of a user, from getting what another graph saves.

    Hooks that return the tensors would not do: with them, an operation that saves its output is never freed.
    """
    found = _take_hooks()
    try:
        yield
    finally:
        _set_hooks(found)


def leave_own_contexts() -> None:
    """Leave the modes and the hooks of saved tensors of this package that this thread is still in.

    An interrupt from the keyboard can come between the entry into a context and the block that leaves it.
    """
    hooks = _take_hooks()
    _set_hooks([(pack, unpack) for pack, unpack in hooks if not _is_own(pack)])
    _keep(torch.overrides._get_current_function_mode_stack(), torch.overrides)  # type: ignore[no-untyped-call]
    _keep(_python_dispatch._get_current_dispatch_mode_stack(), _python_dispatch)


def _keep(modes: list[Any], stack: Any) -> None:
    """Remove the modes of this package from a stack, with functions of PyTorch for it."""
    if any(map(_is_own, modes)):
        for _ in modes:
            stack._pop_mode()
        for mode in modes:
            if not _is_own(mode):
                stack._push_mode(mode)


def _is_own(value: object) -> bool:
    return isinstance(value, FakeTensorMode) or str(getattr(value, "__module__", "")).startswith("lightning_memo.")


def _take_hooks() -> list[tuple[Callable[..., Any], Callable[..., Any]]]:
    """Remove all hooks of saved tensors, and return them from the innermost to the outermost."""
    found = []
    while pair := _hooks._top_saved_tensors_default_hooks(True):
        _hooks._pop_saved_tensors_default_hooks()
        found.append(pair)
    return found


def _set_hooks(hooks: list[tuple[Callable[..., Any], Callable[..., Any]]]) -> None:
    for pack, unpack in reversed(hooks):
        _hooks._push_saved_tensors_default_hooks(pack, unpack)


def _pack_hook() -> Callable[[Tensor], Any] | None:
    pair = _hooks._top_saved_tensors_default_hooks(True)
    return None if pair is None else pair[0]


def _packs_for(*kinds: type[saved_tensors_hooks]) -> bool:
    """Return whether the innermost hook that packs is a function that one of these classes defines."""
    pack = _pack_hook()
    found = getattr(pack, "__module__", ""), getattr(pack, "__qualname__", "").partition(".")[0]
    return found in [(kind.__module__, kind.__qualname__) for kind in kinds]


def _running_functions() -> Iterator[type[torch.autograd.Function]]:
    """Return the autograd functions with a backward in whose forward, which has no graph, this thread is."""
    frame: FrameType | None = None if torch.is_grad_enabled() else sys._getframe()
    while frame is not None:
        code = frame.f_code
        # Before Python 3.13, looking at the variables of a frame keeps their values; leave those of modules alone.
        if code.co_name == "forward" and code.co_argcount and code.co_varnames[0] != "self":
            ctx = frame.f_locals.get(code.co_varnames[0])
            if isinstance(ctx, BackwardCFunction) and ctx.next_functions:  # without, no backward follows
                yield type(ctx)._forward_cls  # type: ignore[attr-defined]
        frame = frame.f_back
