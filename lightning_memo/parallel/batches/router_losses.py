"""Makes the load-balancing losses of Hugging Face's mixtures of experts those of all tokens of all processes.

Note: [Load-balancing losses]
The loss is a product of two sums over tokens: how often each expert is chosen, and how probable it is. It is therefore
not the mean of the losses of the parts of a batch. Each process computes both sums over its own tokens, and the sums,
not the router logits, are added over the processes: a few numbers, whatever the length.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_memo.parallel.batches.token_layout import CurrentLayout
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.replaced_functions import replaced

# What all modules of transformers call the function that computes the loss from the router logits.
_NAME = "load_balancing_loss_func"


class RouterLosses:
    """Replaces the functions that compute load-balancing losses, while a model's forward runs.

    Args:
        current: Holds the layout of the batch.
    """

    def __init__(self, current: CurrentLayout) -> None:
        self._current = current
        self._group: dist.ProcessGroup | None = None

    def use(self, group: dist.ProcessGroup | None) -> None:
        """Set the processes that share the loss of the next step; `None` for one process."""
        self._group = group

    def attach(self, model: nn.Module) -> Callable[[], None]:
        """Watch the forwards of a Hugging Face model. Returns a function that undoes this."""
        functions = {home: getattr(home, _NAME) for home in _homes(model)}
        known = [home for home, function in functions.items() if _is_known(function)]
        foreign = not functions and not type(model).__module__.startswith("transformers.")
        unknown, running = foreign or len(known) < len(functions), contextlib.ExitStack()

        def begin(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._group is None and self._current.layout is None:
                return
            # Text is generated token by token, and not by all processes alike.
            if not (torch.is_grad_enabled() or kwargs.get("labels") is not None):
                return
            if unknown and _asks_for_router_logits(model, kwargs):
                raise ValueError(
                    f"{class_name(model)} may compute a loss from its router logits, which this process would "
                    "compute over its own tokens: set output_router_logits=False, or train in one process"
                )
            for home in known:
                running.enter_context(replaced(home, _NAME, self._loss))

        def end(*_: Any) -> None:
            running.close()

        handles = [
            model.register_forward_pre_hook(begin, with_kwargs=True),
            model.register_forward_hook(end, always_call=True),
        ]

        def undo() -> None:
            end()
            for handle in handles:
                handle.remove()

        return undo

    def _loss(
        self,
        own: Callable[..., Any],
        gate_logits: tuple[Tensor, ...] | None,
        num_experts: int,
        top_k: int = 2,
        attention_mask: Tensor | None = None,
    ) -> Tensor | int:
        """Has the signature of the functions of transformers, behind the function itself."""
        if not isinstance(gate_logits, tuple):
            return 0
        mask = attention_mask if self._current.layout is None else self._mask(gate_logits[0])
        return balancing_loss(gate_logits, num_experts, top_k, mask, self._group)

    def _mask(self, logits: Tensor) -> Tensor | None:
        """Return which of this process's tokens are valid, `[batch, local tokens]`; `None` if all are.

        Raises:
            ValueError: The router logits are not those of the batch.
        """
        layout = self._current.layout
        if layout is None or layout.lengths is None:
            return None
        mask = layout.fed_order()[None] < torch.tensor(layout.lengths)[:, None]
        if mask.numel() != logits[..., 0].numel():
            raise ValueError(
                f"a load-balancing loss got router logits {list(logits.shape)} for a batch of {mask.shape[0]} rows and "
                f"{mask.shape[1]} tokens on this process: call the model with the whole batch of the step, or set "
                "output_router_logits=False"
            )
        return mask.to(logits.device)


def balancing_loss(
    gate_logits: tuple[Tensor, ...],
    num_experts: int,
    top_k: int,
    attention_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the load-balancing loss of transformers (Switch Transformer, equations 4 to 6) over several processes.

    Args:
        gate_logits: Router logits of each layer for this process's tokens, `[batch * tokens, experts]`.
        num_experts: Number of experts.
        top_k: Number of experts that a token is sent to.
        attention_mask: 1 for tokens that count, `[batch, tokens]`; `None` if all do.
        group: The processes. The mean of their gradients is the gradient of the loss.

    Returns:
        A scalar, the same on all processes.
    """
    device, sizes = gate_logits[0].device, (num_experts, num_experts, 1)
    # In fp32 also where new tensors are bf16 by default, which counts no more than 256 tokens.
    counts, probabilities, rows = (torch.zeros(n, dtype=torch.float32, device=device) for n in sizes)
    for logits in gate_logits:
        weights = torch.softmax(logits.to(device), dim=-1)
        chosen = weights.topk(top_k, dim=-1).indices
        counted = weights.new_ones(len(weights), dtype=torch.float32)
        if attention_mask is not None:
            counted = attention_mask.reshape(-1).to(counted)
        counts = counts.index_add(0, chosen.reshape(-1), counted.repeat_interleave(top_k))
        probabilities = probabilities + (weights.float() * counted[:, None]).sum(0)
        rows = rows + counted.sum()
    sums = torch.cat([counts, probabilities, rows])
    if group is not None:
        sums = _SumOverProcesses.apply(sums, group)
    counts, probabilities, rows = sums.split(sizes)
    return (counts / rows * (probabilities / rows)).sum() * num_experts


class _SumOverProcesses(torch.autograd.Function):
    """The sum of a tensor over processes, all of which compute the same loss from it."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.processes = dist.get_world_size(group)
        total = t.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        # The gradients of parameters are averaged over the processes.
        return gradient * ctx.processes, None


def _homes(model: nn.Module) -> list[ModuleType]:
    """Return the Python modules of a model's classes that have a function for the loss."""
    names = {kind.__module__ for m in model.modules() for kind in type(m).__mro__}
    return [sys.modules[name] for name in sorted(names) if hasattr(sys.modules.get(name), _NAME)]


@functools.cache
def _is_known(function: Callable[..., Any]) -> bool:
    """Whether a function computes what `balancing_loss` computes."""
    draw = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(6, 4, generator=draw, device="cpu") for _ in range(2))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]], device="cpu")
    try:
        return all(
            torch.allclose(function(logits, 4, 2, m), balancing_loss(logits, 4, 2, m), rtol=1e-4) for m in (None, mask)
        )
    except Exception:  # another signature
        return False


def _asks_for_router_logits(model: Any, kwargs: dict[str, Any]) -> bool:
    asked = kwargs.get("output_router_logits")
    return bool(getattr(model.config.get_text_config(), "output_router_logits", False) if asked is None else asked)
