"""Packed projections, which hold several matrices in one: `[q | k | v]` and `[gate | up]` of Phi-3 and GLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from lightning_memo.parallel.tensor.module_styles import Block, Colwise, local
from lightning_memo.utils.retained_graph import first_derivative


class RowExchange:
    """Fetches for each rank its rows of every part of a packed matrix.

    The parameter is sharded by contiguous rows like any other, so that checkpoints resume with any number of ranks.
    Most rows that a rank computes with are therefore stored on other ranks. Each row is used by one rank: one
    all-to-all fetches the rows, and another returns their gradients.

    Args:
        parts: Number of rows of each part. The number of ranks divides each of them.
        mesh: One-dimensional mesh of the ranks.
        device: Device of the matrix.
    """

    def __init__(self, parts: Sequence[int], mesh: DeviceMesh, device: torch.device) -> None:
        ranks, self._group = mesh.size(), mesh.get_group()
        rows = sum(parts)
        user = torch.cat([torch.arange(part) // (part // ranks) for part in parts])
        holder = torch.arange(rows) // (rows // ranks)
        mine = mesh.get_local_rank()
        self._sent = torch.bincount(user[holder == mine], minlength=ranks).tolist()
        self._received = torch.bincount(holder[user == mine], minlength=ranks).tolist()
        # Stable sort by user: rows received from ranks 0, 1, ... are then in order, part by part.
        self._order = torch.argsort(user[holder == mine], stable=True).to(device)

    def fetch(self, held: Tensor) -> Tensor:
        """Returns the rows that this rank computes with, part by part, from the rows that it stores."""
        rows = torch.empty_like(held)
        dist.all_to_all_single(rows, held[self._order], self._received, self._sent, group=self._group)
        return rows

    def give_back(self, rows: Tensor) -> Tensor:
        """Inverse of `fetch`, for gradients."""
        sorted_by_user = torch.empty_like(rows)
        dist.all_to_all_single(sorted_by_user, rows.contiguous(), self._sent, self._received, group=self._group)
        held = torch.empty_like(rows)
        held[self._order] = sorted_by_user
        return held


class _PackedLinear(torch.autograd.Function):
    """`x @ weight.T` with fetched rows. Backward fetches them again, because saving them would double their memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Tensor, exchange: RowExchange) -> Tensor:
        ctx.save_for_backward(x, held)
        ctx.exchange = exchange
        return F.linear(x, exchange.fetch(held))

    @staticmethod
    @first_derivative
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
    @first_derivative
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.give_back(grad), None


class PackedColwise(Colwise):
    """A column-wise linear layer whose output features are several parts, each split over the ranks.

    Args:
        source: As for `Colwise`.
        parts: Number of output features of each part.
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


class PackedAttention(Block):
    """An attention module that splits its packed projection by head counts, which are set to this rank's share."""

    def prepare(self, module: nn.Module) -> None:
        super().prepare(module)
        ranks = self.mesh.size()
        module.config = LocalConfig(
            module.config,
            num_attention_heads=module.config.num_attention_heads // ranks,
            num_key_value_heads=module.config.num_key_value_heads // ranks,
        )
        module.num_key_value_heads //= ranks
