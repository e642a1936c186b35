"""Projections that hold several matrices in one: `[q | k | v]` and `[gate | up]` of Phi-3 and GLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from lightning_memo.parallel.tensor.module_styles import Block, Colwise, local


class RowExchange:
    """Brings to each rank its rows of every part of a packed matrix.

    The parameter is split like any other, rank by rank from its first row to its last, so that checkpoints resume with
    any number of ranks; so most rows that a rank computes with lie on others. Each row has one place to go: an
    all-to-all there, and one back for its gradient.

    Args:
        parts: Rows of each part; the ranks divide each of them.
        mesh: The ranks.
        device: Where the matrix is.
    """

    def __init__(self, parts: Sequence[int], mesh: DeviceMesh, device: torch.device) -> None:
        ranks, self._group = mesh.size(), mesh.get_group()
        rows = sum(parts)
        user = torch.cat([torch.arange(part) // (part // ranks) for part in parts])
        holder = torch.arange(rows) // (rows // ranks)
        mine = mesh.get_local_rank()
        self._sent = torch.bincount(user[holder == mine], minlength=ranks).tolist()
        self._received = torch.bincount(holder[user == mine], minlength=ranks).tolist()
        # Sorted by user, but in their order for each: what comes from ranks 0, 1, ... is in order then, part by part.
        self._order = torch.argsort(user[holder == mine], stable=True).to(device)

    def fetch(self, held: Tensor) -> Tensor:
        """The rows that this rank computes with, part by part, from those that it holds."""
        rows = torch.empty_like(held)
        dist.all_to_all_single(rows, held[self._order], self._received, self._sent, group=self._group)
        return rows

    def give_back(self, rows: Tensor) -> Tensor:
        """The reverse of `fetch`."""
        sorted_by_user = torch.empty_like(rows)
        dist.all_to_all_single(sorted_by_user, rows.contiguous(), self._sent, self._received, group=self._group)
        held = torch.empty_like(rows)
        held[self._order] = sorted_by_user
        return held


class _PackedLinear(torch.autograd.Function):
    """`x @ weight.T` with fetched rows, which backward fetches again: kept, they would double the weights' memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Tensor, exchange: RowExchange) -> Tensor:
        ctx.save_for_backward(x, held)
        ctx.exchange = exchange
        return F.linear(x, exchange.fetch(held))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, held = ctx.saved_tensors
        grad_x = grad @ ctx.exchange.fetch(held) if ctx.needs_input_grad[0] else None
        grad_held = None
        if ctx.needs_input_grad[1]:
            grad_held = ctx.exchange.give_back(grad.flatten(0, -2).T @ x.flatten(0, -2))
        return grad_x, grad_held, None


class _Fetch(torch.autograd.Function):
    """`RowExchange.fetch` with a gradient."""

    @staticmethod
    def forward(ctx: FunctionCtx, held: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange  # type: ignore[attr-defined]
        return exchange.fetch(held)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.give_back(grad), None


class PackedColwise(Colwise):
    """A column-wise linear layer whose output features are several parts, each divided by the ranks.

    Args:
        source: As for `Colwise`.
        parts: Output features of each part.
    """

    def __init__(self, source: Block | Placement | None, parts: Sequence[int]) -> None:
        super().__init__(source)
        self.parts = parts

    def prepare(self, module: nn.Module) -> None:
        self.exchange = RowExchange(self.parts, self.mesh, module.weight.device)

    def project(self, module: nn.Module, x: Tensor) -> Tensor:
        weight = local(module.weight)
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        y = _PackedLinear.apply(x, weight, self.exchange)
        return y if module.bias is None else y + _Fetch.apply(local(module.bias), self.exchange).to(y.dtype)


class LocalConfig:
    """A module's configuration, but for the numbers of which each rank has its share.

    Everything else is asked of the whole configuration, which may change later (the attention implementation does).
    """

    def __init__(self, whole: Any, **shares: int) -> None:
        self.__dict__.update(shares, _whole=whole)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_whole":
            raise AttributeError(name)
        return getattr(self._whole, name)


class PackedAttention(Block):
    """An attention module that cuts its packed projection by the numbers of heads it knows: here, this rank's."""

    def prepare(self, module: nn.Module) -> None:
        super().prepare(module)
        ranks = self.mesh.size()
        module.config = LocalConfig(
            module.config,
            num_attention_heads=module.config.num_attention_heads // ranks,
            num_key_value_heads=module.config.num_key_value_heads // ranks,
        )
        module.num_key_value_heads //= ranks
