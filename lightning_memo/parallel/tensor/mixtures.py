"""Mixtures of experts whose experts are divided over ranks, whole experts to each.

Tensor-parallel ranks have the same tokens: each computes its own experts for all of them, and the outputs are summed.
Expert-parallel ranks have different tokens, and send them to each other. With both, each tensor-parallel rank sends
those that need its own experts. No token is dropped, however uneven the loads are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from lightning_memo.parallel.device_mesh import ExpertMeshes
from lightning_memo.parallel.tensor.module_styles import FirstArgument, Forward, TensorStyle, local_parameters, move
from lightning_memo.parallel.tensor.token_exchange import TokenExchange, exchanges


class Mixture(TensorStyle):
    """A module that routes tokens to experts. Its input is gathered, and every rank computes all but the experts.

    The gradients inside are therefore whole on every rank, unlike those of an attention or MLP module.

    Args:
        stream: Layout of the stream.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def prepare(self, module: nn.Module) -> None:
        self._call_with = FirstArgument(module)

    def forward(self, module: nn.Module, original: Forward, *args: Any, **kwargs: Any) -> Any:
        result = self._call_with(self._enter, original, *args, **kwargs)
        if isinstance(result, tuple):
            return (self._leave(result[0]), *result[1:])
        return self._leave(result)

    def _enter(self, x: Tensor) -> Tensor:
        return move(x, self.mesh, self.stream, Replicate(), gradient=Replicate())

    def _leave(self, x: Tensor) -> Tensor:
        return move(x, self.mesh, Replicate(), self.stream)


class Experts(TensorStyle):
    """Experts whose weights are stacked, `[experts, ...]`; each rank has some of them.

    Their forward gets hidden states `[tokens, hidden]`, the chosen experts and their weights `[tokens, choices]`. Here
    it gets a row for each choice of an expert of this rank.

    Args:
        meshes: Where the experts are; `None` if tensor-parallel ranks alone divide them.
    """

    def __init__(self, meshes: ExpertMeshes | None = None) -> None:
        super().__init__()
        self._meshes = meshes

    def placement(self, name: str) -> Placement:
        return Shard(0)

    def prepare(self, module: nn.Module) -> None:
        self._count = module.num_experts // self.mesh.size()
        self._start = self._count * self.mesh.get_local_rank()
        self._arguments = inspect.signature(module.forward)
        self._tensor = self.mesh if self._meshes is None else self._meshes.tensor

    def forward(self, module: nn.Module, original: Forward, *args: Any, **kwargs: Any) -> Tensor:
        x, index, weights = self._arguments.bind(*args, **kwargs).args
        if self._tensor.size() == 1:
            return self._exchanged(module, original, x, index, weights)
        x, weights = (move(t, self._tensor, Replicate(), Replicate(), gradient=Partial()) for t in (x, weights))
        part = self._exchanged(module, original, x, index, weights)
        return move(part, self._tensor, Partial(), Replicate())

    def _exchanged(self, module: nn.Module, original: Forward, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Returns what the experts of this tensor-parallel rank, wherever they are, add to the tokens."""
        if self._meshes is None:
            return self._compute(module, original, x, index, weights)
        if not exchanges():
            return self._compute(module, original, x, self._stand_ins(index), weights)
        exchange = TokenExchange(self._choices(index), self._meshes.exchange.get_group())
        received = [exchange.send(t) for t in (x, index, weights)]
        return exchange.give_back(self._compute(module, original, *received, exchange.received_choices))

    def _stand_ins(self, index: Tensor) -> Tensor:
        """Returns chosen experts, where those of other expert-parallel ranks are replaced by experts of this one."""
        tensor = self._tensor.size()
        return (self._start // self._count // tensor * tensor + index // self._count % tensor) * self._count + (
            index % self._count
        )

    def _choices(self, index: Tensor) -> Tensor:
        """Returns how many experts on each expert-parallel rank each token has chosen, `[tokens, ranks]`."""
        meshes = self._meshes
        assert meshes is not None
        homes = index.new_zeros(len(index), self.mesh.size())
        homes.scatter_add_(1, index // self._count, torch.ones_like(index))
        own: Tensor = homes.unflatten(1, (-1, meshes.tensor.size()))[:, :, meshes.tensor.get_local_rank()]
        return own

    def _compute(
        self, module: nn.Module, original: Forward, x: Tensor, index: Tensor, weights: Tensor, known: int | None = None
    ) -> Tensor:
        """Returns the sum of the outputs of this rank's experts for each row of `x`.

        Args:
            module: The experts.
            original: Their forward.
            x: Hidden states.
            index: The chosen experts.
            weights: Their weights.
            known: How many choices are experts of this rank, if it is known: the host does not wait for it then.
        """
        own = index - self._start
        present = (own >= 0) & (own < self._count)
        rows, choices = (present.nonzero() if known is None else torch.nonzero_static(present, size=known)).unbind(1)
        inputs, chosen, shares = x.index_select(0, rows), own[rows, choices][:, None], weights[rows, choices][:, None]
        if not len(rows):  # one of zeros, so that all ranks have the same graph and a gradient for every weight
            inputs, chosen, shares = (F.pad(t, (0, 0, 0, 1)) for t in (inputs, chosen, shares))
        with local_parameters(module), self._local_count(module):
            outputs = original(inputs, chosen, shares)[: len(rows)]
        total: Tensor = _SumRows.apply(outputs, rows, len(x))
        return total

    @contextmanager
    def _local_count(self, module: nn.Module) -> Iterator[None]:
        """Within this context the module has this rank's experts. Routers outside may read how many there are."""
        before = module.num_experts
        module.num_experts = self._count
        try:
            yield
        finally:
            module.num_experts = before


class _SumRows(torch.autograd.Function):
    """Adds rows to those of a tensor of zeros. `index_add` would save the rows, which its backward does not need."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(index)
        return rows.new_zeros(count, *rows.shape[1:]).index_add_(0, index, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return gradient.index_select(0, index), None, None


def is_stacked(module: nn.Module) -> bool:
    """Whether a module is experts whose weights are stacked and that get hidden states, choices and their weights."""
    weights = [p for p in module._parameters.values() if p is not None]
    count = getattr(module, "num_experts", None)
    stacked = all(p.is_floating_point() and p.dim() > 1 and len(p) == count for p in weights)
    return bool(weights) and stacked and len(inspect.signature(module.forward).parameters) == 3
