"""Linear modules that LoRA adapts, computed by one operation.

Note: [Fused adapters]
PEFT computes `base(x) + B(A(dropout(x))) * scaling`. Besides the products, that takes four passes over memory of the
output's width (the output of B, its scaling, their sum), and in the backward a pass that scales the gradient and one
that adds the two gradients of `x`. Here, the product with B adds to the output of the base layer, and the product with
A to the gradient of `x`. Adapters of another type than the base layer are cast, not the layer's input and output.

The backward reads `x`, `A(x)` and weights. A recomputation therefore needs `A(x)`, but the output only if something
else reads it: it is one matrix product for those who store products.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor, nn

from lightning_memo.engine.forward.autocast import autocast_type
from lightning_memo.utils.retained_graph import first_derivative

Compute = Callable[[], Tensor]
Output = Callable[[nn.Module, Compute, tuple[Tensor, ...]], Tensor | None]

OUTPUT: Final[ContextVar[Output | None]] = ContextVar("output", default=None)
"""Returns the output of a module, `[rows, columns]`, given a function that computes it and what autograd saves.

It returns `None` if nothing is going to read the output.
"""

# Products of weights are named by a mode for functions of torch, which does not see operators.
_mm, _addmm, _addmm_ = torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_
_unsafe_view = torch.ops.aten._unsafe_view


class AdaptedLinear(torch.autograd.Function):
    """See Note: [Fused adapters]."""

    @staticmethod
    def forward(
        ctx: Any,
        module: nn.Module,
        scaling: float,
        x: Tensor,
        dropped: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
    ) -> Tensor:
        dtype, same = autocast_type(x) or x.dtype, dropped is x
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        low = rows if same else dropped.reshape(rows.shape).to(dtype)
        inner = _mm(low, a.to(dtype).t())

        def compute() -> Tensor:
            matrix = weight.to(dtype).t()
            out = _mm(rows, matrix) if bias is None else _addmm(bias.to(dtype), rows, matrix)
            return _addmm_(out, inner, b.to(dtype).t(), alpha=scaling)

        _, _, needs_x, needs_dropped, needs_weight, _, needs_a, needs_b = ctx.needs_input_grad
        kept = rows if needs_weight or (same and needs_a) else None
        kept_low = low if needs_a and not same else None
        kept_inner = inner if needs_b else None
        output = OUTPUT.get()
        saved = tuple(t for t in (kept, kept_low, kept_inner) if t is not None)
        out = compute() if output is None or not any(ctx.needs_input_grad) else output(module, compute, saved)
        if out is None:
            out = inner.new_empty(len(inner), len(weight))
        of_dropped = needs_x if same else needs_dropped
        weights = weight if needs_x else None, a if of_dropped else None, b if needs_a or of_dropped else None
        ctx.save_for_backward(kept, kept_low, kept_inner, *weights)
        ctx.scaling, ctx.same, ctx.shape = scaling, same, x.shape
        ctx.dtypes = x.dtype, dropped.dtype, weight.dtype, a.dtype, b.dtype
        return _unsafe_view(out, [*x.shape[:-1], len(weight)])  # a view could not be written to

    @staticmethod
    @first_derivative
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        with torch.autocast(dy.device.type, enabled=False):
            return _gradients(ctx, dy)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    rows, low, inner, weight, a, b = ctx.saved_tensors
    low, nothing = rows if ctx.same else low, dy.new_empty(())
    _, _, needs_x, needs_dropped, needs_weight, needs_bias, needs_a, needs_b = ctx.needs_input_grad
    of_x, of_dropped, of_weight, of_a, of_b = ctx.dtypes
    dy = dy.reshape(-1, dy.shape[-1])
    d_inner = None if b is None else torch.addmm(nothing, dy, b.to(dy.dtype), beta=0, alpha=ctx.scaling)
    dx = dy.mm(weight.to(dy.dtype)) if needs_x else None
    d_dropped = None
    if ctx.same and dx is not None:
        dx.addmm_(d_inner, a.to(dy.dtype))
    elif needs_dropped and not ctx.same:
        d_dropped = d_inner.mm(a.to(dy.dtype))
    return (
        None,
        None,
        None if dx is None else dx.view(ctx.shape).to(of_x),
        None if d_dropped is None else d_dropped.view(ctx.shape).to(of_dropped),
        dy.t().mm(rows).to(of_weight) if needs_weight else None,
        dy.sum(0).to(of_weight) if needs_bias else None,
        d_inner.t().mm(low).to(of_a) if needs_a else None,
        torch.addmm(nothing, dy.t(), inner, beta=0, alpha=ctx.scaling).to(of_b) if needs_b else None,
    )


def adapted_modules(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the linear modules of a layer that LoRA adapts, with their names."""
    lora = sys.modules.get("peft.tuners.lora.layer")
    if lora is not None:
        yield from (named for named in layer.named_modules() if isinstance(named[1], lora.Linear))
