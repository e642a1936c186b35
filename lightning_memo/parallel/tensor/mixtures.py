"""Mixtures of experts whose experts are divided over the tensor-parallel ranks, whole experts to each.

Every rank routes all tokens, computes its own experts for them, and the outputs are summed. No token is dropped or sent
to another rank, however uneven the loads are.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from lightning_memo.parallel.tensor.module_styles import FirstArgument, Forward, TensorStyle, local_parameters, move


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

    Their forward gets hidden states `[tokens, hidden]`, the chosen experts and their weights `[tokens, choices]`. As
    with transformers' expert parallelism, number `num_experts` stands for an expert that is elsewhere.
    """

    def placement(self, name: str) -> Placement:
        return Shard(0)

    def prepare(self, module: nn.Module) -> None:
        self._count = module.num_experts // self.mesh.size()
        self._start = self._count * self.mesh.get_local_rank()
        self._arguments = inspect.signature(module.forward)

    def forward(self, module: nn.Module, original: Forward, *args: Any, **kwargs: Any) -> Tensor:
        x, index, weights = self._arguments.bind(*args, **kwargs).args
        own = index - self._start
        elsewhere = (own < 0) | (own >= self._count)
        x, weights = (move(t, self.mesh, Replicate(), Replicate(), gradient=Partial()) for t in (x, weights))
        with local_parameters(module), self._local_count(module):
            part = original(x, own.masked_fill(elsewhere, self._count), weights.masked_fill(elsewhere, 0))
        return move(part, self.mesh, Partial(), Replicate())

    @contextmanager
    def _local_count(self, module: nn.Module) -> Iterator[None]:
        """Within this context the module has this rank's experts. Routers outside may read how many there are."""
        before = {name: vars(module).get(name, False) for name in ("num_experts", "_is_expert_parallel")}
        vars(module).update(num_experts=self._count, _is_expert_parallel=True)
        try:
            yield
        finally:
            vars(module).update(before)
