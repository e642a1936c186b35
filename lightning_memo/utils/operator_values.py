"""What operators of PyTorch get and return: values, and sequences of them. `tree_leaves` takes several times longer."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def values_in(*given: Any) -> list[Any]:
    """Return the values among arguments or results of an operator, in their order.

    Args:
        given: Values, and tuples, lists and dicts of them.
    """
    found: list[Any] = []
    for value in given:
        if isinstance(value, (tuple, list)):
            found += values_in(*value)
        elif isinstance(value, dict):
            found += values_in(*value.values())
        else:
            found.append(value)
    return found


def tensors_in(*given: Any) -> list[Tensor]:
    """Return the tensors among arguments or results of an operator, in their order."""
    return [value for value in values_in(*given) if isinstance(value, Tensor)]
