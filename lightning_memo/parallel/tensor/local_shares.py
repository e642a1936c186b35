"""What a module of which each rank has a part counts as its own: attributes and settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

_OF_SINGLE_HEADS = ("dim", "size", "hidden")


class FirstArgument:
    """Calls a function with another first argument, which is given by position or by name.

    Args:
        module: Module whose forward has the function's arguments.
    """

    def __init__(self, module: nn.Module) -> None:
        self._name = next(iter(inspect.signature(module.forward).parameters))

    def __call__(
        self, change: Callable[[Tensor], Tensor], function: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if args:
            return function(change(args[0]), *args[1:], **kwargs)
        return function(**kwargs | {self._name: change(kwargs[self._name])})


class LocalConfig:
    """A module's configuration with some numbers replaced by this rank's share.

    Other attributes are read from the whole configuration when they are used, because some change later (for example
    the attention implementation).

    Args:
        whole: Configuration of the whole module.
        shares: Attributes that are replaced.
    """

    def __init__(self, whole: Any, **shares: int) -> None:
        self.__dict__.update(shares, _whole=whole)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_whole":
            raise AttributeError(name)
        return getattr(self._whole, name)


@dataclass(frozen=True)  # the engine compares styles by their attributes
class LocalShares:
    """Numbers of heads or features that are divided by the number of ranks.

    Attributes:
        attributes: Names of attributes of a module.
        settings: Names in its configuration, `module.config`.
    """

    attributes: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    @classmethod
    def possible(cls, module: nn.Module, sizes: Collection[int], ranks: int) -> list[LocalShares]:
        """Returns what may have to be divided, the simplest first.

        Args:
            module: The module.
            sizes: Numbers of features that are divided.
            ranks: Number of ranks.
        """
        heads = tuple(name for name, n in _numbers(module) if _counts_heads(name) and n % ranks == 0)
        features = tuple(name for name, n in _numbers(module) if n in sizes and name not in heads)
        config = getattr(module, "config", None)
        settings = tuple(name for name, n in _numbers(config) if _counts_heads(name) and n % ranks == 0)
        found = [cls(names, others) for names in ((), heads, heads + features) for others in ((), settings)]
        return list(dict.fromkeys(found))

    @staticmethod
    def counts(module: nn.Module) -> set[int]:
        """Returns the numbers of heads in a module's attributes and configuration."""
        numbers = [*_numbers(module), *_numbers(getattr(module, "config", None))]
        return {n for name, n in numbers if _counts_heads(name)}

    def values(self, module: nn.Module, ranks: int) -> dict[str, Any]:
        """Returns the attributes of a module on each rank."""
        own: dict[str, Any] = {name: getattr(module, name) // ranks for name in self.attributes}
        if self.settings:
            config = module.config
            own["config"] = LocalConfig(config, **{name: getattr(config, name) // ranks for name in self.settings})
        return own


def _numbers(holder: Any) -> list[tuple[str, int]]:
    return [(name, n) for name, n in getattr(holder, "__dict__", {}).items() if type(n) is int and n > 0]


def _counts_heads(name: str) -> bool:
    return "head" in name and not any(word in name for word in _OF_SINGLE_HEADS)
