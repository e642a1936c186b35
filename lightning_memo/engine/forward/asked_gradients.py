"""Layers that ask whether gradients go through a tensor, and may do something else then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_memo.engine.forward.intercept import OwnMode

_ROOTS: tuple[Any, ...] = (Tensor.is_leaf.__get__, Tensor.grad_fn.__get__)  # type: ignore[attr-defined]
_QUESTIONS: tuple[Any, ...] = (*_ROOTS, Tensor.requires_grad.__get__)


class NotedQuestions(OwnMode):
    """Notes whether a layer asks for the gradients of any tensor.

    If the model lets the first hidden states require grad (`enable_input_require_grads` of transformers), they are a
    leaf of autograd's graph. Where the engine runs a layer, its input is a function of that leaf.

    Args:
        name: Name of the layer's class.
        leaf: The layer's input, if it is such a leaf; `None` otherwise.

    Attributes:
        asked: Whether the layer has asked.
    """

    def __init__(self, name: str, leaf: Tensor | None) -> None:
        super().__init__()
        self.asked = False
        self._name, self._leaf = name, leaf

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.asked |= func in _QUESTIONS
        if func in _ROOTS and args[0] is self._leaf:
            raise ValueError(
                f"{self._name} asks is_leaf or grad_fn of its input, which is a leaf in plain training and a function "
                "of that leaf here: let it ask requires_grad"
            )
        return func(*args, **(kwargs or {}))
