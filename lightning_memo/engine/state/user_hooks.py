"""Hooks of users on modules, and on all modules. Those of libraries treat each token by itself."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

from lightning_memo.engine.state.user_objects import is_of_a_library

_NAMES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS: list[dict[int, Any]] = [getattr(torch_modules, f"_global{name}") for name in _NAMES]


def hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """Return the hooks on a module, by kind."""
    own = vars(module)
    return [own[name] for name in _NAMES]


def hooks_of_users(tables: list[dict[int, Any]]) -> list[tuple[int, Any]]:
    """Return the hooks of users in some tables, each with the number of its table."""
    found = []
    for number, table in enumerate(tables):
        if table:  # most are empty, and this runs for each module in each call of a layer
            found += [(number, hook) for hook in table.values() if not is_of_a_library(hook)]
    return found
