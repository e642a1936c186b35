"""What the caller of a backward wants of its graph: another backward (`retain_graph`), or one of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from lightning_memo.utils.around_forward import is_in_backward, without_saved_tensors_hooks

NOT_RETAINED: Final = (
    "a second backward through the same graph, which the first one did not keep: set retain_graph=True in the first "
    "one, sum the losses, or run a forward for each"
)
NEVER_DIFFERENTIATED: Final = "a recomputed graph is never differentiated"


def graph_is_retained() -> bool:
    """Return whether a backward runs after which its graph can have another one."""
    return is_in_backward() and torch._C._autograd._get_current_graph_task_keep_graph()


def refuse_second_derivatives() -> None:
    """Check that the running backward is not to be differentiated itself.

    Raises:
        RuntimeError: It is.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "second derivatives (create_graph=True) are not supported, as the backward of layers, logits and losses "
            "has no graph: compute them without lightning_memo"
        )


def first_derivative(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the backward of an autograd function that refuses to be differentiated itself.

    Hooks of saved tensors around the backward do not get what graphs within it save. PyTorch's `once_differentiable`
    returns constants if the incoming gradient is one, as that of a loss is.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        refuse_second_derivatives()
        with without_saved_tensors_hooks():
            return backward(ctx, *gradients)

    return checked
