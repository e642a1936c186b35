"""Which objects and classes are a user's, so that what they hold may be state of a layer."""

from __future__ import annotations

import functools
import sys
from collections import UserDict, UserList
from typing import Any

from torch import nn

from lightning_memo.utils.python_objects import dict_of, package_of, slots_of

_FRAMEWORKS = frozenset({"torch", "lightning", "pytorch_lightning", "accelerate", "lightning_memo"})
# Packages whose code treats each token by itself, and keeps no count of what a layer computes.
TRUSTED = _FRAMEWORKS | {"transformers", "peft", "torchao", "bitsandbytes", "liger_kernel"}
# Objects of these are no state of a layer, for example FSDP's, which changes between forward and backward. Those of
# TransformerEngine are restored by `fp8_modules`.
LIBRARIES = _FRAMEWORKS | {"transformer_engine"} | (sys.stdlib_module_names - {"types", "argparse"})
# Classes of a library whose objects hold what users put into them.
_HELD_BY_USERS = frozenset({UserDict, UserList})


@functools.lru_cache(maxsize=1024)
def is_users(kind: type) -> bool:
    """Return whether objects of a class have attributes or slots, and are no state of a library."""
    if issubclass(kind, (nn.Module, type)) or not (kind.__dictoffset__ or slots_of(kind)):
        return False
    return kind in _HELD_BY_USERS or package_of(kind) not in LIBRARIES


def attributes_of(value: object) -> dict[str, Any] | None:
    """Return the attributes of an object of a user's class, which may be state of a layer; `None` for other objects."""
    return dict_of(value) if is_users(type(value)) else None


@functools.lru_cache(maxsize=1024)
def classes_of(kind: type) -> tuple[type, ...]:
    """Return a class and those from which it is derived, apart from those of libraries."""
    return tuple(c for c in kind.__mro__ if package_of(c) not in LIBRARIES)


def is_of_a_library(code: Any) -> bool:
    """Return whether a function or a class is of a package whose code treats each token by itself."""
    return home_of(code) in TRUSTED


def home_of(code: Any) -> str:
    """Return the name of the package of a function or a class."""
    code = code.func if isinstance(code, functools.partial) else code
    home: str = getattr(code, "__module__", None) or type(code).__module__
    return home.partition(".")[0]
