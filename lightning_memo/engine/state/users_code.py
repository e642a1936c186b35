"""Which objects, functions and hooks are a user's. Those of libraries treat each token by itself, and keep no count."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_modules

from lightning_memo.utils.python_objects import dict_of, package_of

_FRAMEWORKS = frozenset({"torch", "lightning", "pytorch_lightning", "accelerate", "lightning_memo"})
_TRUSTED = _FRAMEWORKS | {"transformers", "peft", "torchao", "bitsandbytes", "liger_kernel"}
# Objects of these are no state of a layer, for example FSDP's, which changes between forward and backward. Those of
# TransformerEngine are restored by `fp8_modules`.
_LIBRARIES = _FRAMEWORKS | {"transformer_engine"} | (sys.stdlib_module_names - {"types", "argparse"})

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS: list[dict[int, Any]] = [getattr(torch_modules, f"_global{name}") for name in _HOOKS]


@functools.lru_cache(maxsize=1024)
def is_users(kind: type) -> bool:
    """Return whether objects of a class have attributes, and are no state of a library."""
    return bool(kind.__dictoffset__ and not issubclass(kind, (nn.Module, type)) and package_of(kind) not in _LIBRARIES)


def attributes_of(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object of a user's class, which may be state of a layer; `None` for other objects."""
    return dict_of(value) if is_users(type(value)) else None


def is_of_a_library(code: Any) -> bool:
    """Return whether a function or a class is of a package whose code treats each token by itself."""
    return home_of(code) in _TRUSTED


def home_of(code: Any) -> str:
    """Return the name of the package of a function or a class."""
    code = code.func if isinstance(code, functools.partial) else code
    home: str = getattr(code, "__module__", None) or type(code).__module__
    return home.partition(".")[0]


def hook_tables(module: nn.Module) -> list[dict[int, Any]]:
    """Return the hooks on a module, by kind."""
    own = vars(module)
    return [own[name] for name in _HOOKS]


def hooks_of_users(tables: list[dict[int, Any]]) -> list[tuple[int, Any]]:
    """Return the hooks of users in some tables, each with the number of its table."""
    found = []
    for number, table in enumerate(tables):
        if table:  # most are empty, and this runs for each module in each call of a layer
            found += [(number, hook) for hook in table.values() if not is_of_a_library(hook)]
    return found
