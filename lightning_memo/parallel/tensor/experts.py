"""Mixtures of experts whose experts are divided over ranks, whole experts to each.

Tensor-parallel ranks have the same tokens: each computes its own experts for all of them, and the outputs are summed.
Expert-parallel ranks have different tokens, and send them to each other. With both, each tensor-parallel rank sends
those that need its own experts. No token is dropped, however uneven the loads are.

Note: [What a recomputation repeats]
Who sends how many tokens to whom follows from the choice of experts, which a recomputation repeats. Plans of exchanges
are therefore no tensors that autograd saves. Nothing is saved after the results have come back, so that a
recomputation ends before that, unless the layer goes on to compute with them.

Note: [Runs of one rank alone]
A rank that gets a layer's first mask, or other arguments that are new to it, tries the layer out, while the other ranks
may have nothing to try. In such runs it sends nothing: its own experts stand in for those of other ranks. That is
enough to see whether the layer repeats its results and computes in slices what it computes as a whole, because each row
still goes by itself to the experts that it has chosen.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from lightning_memo.parallel.device_mesh import ExpertMeshes
from lightning_memo.parallel.tensor.local_shares import FirstArgument
from lightning_memo.parallel.tensor.module_styles import Forward, TensorStyle, local_parameters, move
from lightning_memo.utils.class_names import class_name

_is_alone = ContextVar("_is_alone", default=False)


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

    def placement(self, module: nn.Module, name: str) -> Placement:
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
        if not _exchanges():
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

    @contextlib.contextmanager
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


def find_experts(module: nn.Module) -> dict[str, nn.Module]:
    """Returns the experts of the mixture layers of a model, by name."""
    return {name: m for name, m in module.named_modules() if is_stacked(m)}


def check_experts(module: nn.Module, experts: int, tensor: int) -> None:
    """Check that the experts of a model can be divided evenly. Needs no process group.

    Args:
        module: The model.
        experts: Expert-parallel size.
        tensor: Tensor-parallel size.

    Raises:
        ValueError: The model has no experts, they have adapters, or a number of experts is not divisible.
    """
    found = find_experts(module)
    if not found:
        raise ValueError(
            f"expert_parallel_size={experts}: {class_name(module)} has no experts with stacked weights, [experts, "
            "...], that get hidden states, choices and their weights: set expert_parallel_size=1"
        )
    common = math.gcd(*(int(m.num_experts) for m in found.values()))
    allowed = ", ".join(str(n) for n in range(1, common + 1) if common % (n * tensor) == 0)
    for name, m in found.items():
        if "base_layer" in name.split("."):
            raise ValueError(
                f"expert_parallel_size={experts}: {name} has an adapter on the weights of experts, which is not "
                "divided: leave it out, or set expert_parallel_size=1"
            )
        if m.num_experts % (experts * tensor):
            times = f" x tensor_parallel_size={tensor}" if tensor > 1 else ""
            raise ValueError(
                f"expert_parallel_size={experts}{times} does not divide num_experts of {name}={m.num_experts}: "
                f"expert_parallel_size can be {allowed or 'none: lower tensor_parallel_size'}"
            )


def shard_experts(experts: Iterable[nn.Module], meshes: ExpertMeshes) -> None:
    """Give each rank its experts, in place. The weights become `DTensor`s on `meshes.homes`.

    Args:
        experts: Experts, with the same weights on all ranks. Each keeps its part, and nothing is sent.
        meshes: Where the experts are.
    """
    for m in experts:
        parallelize_module(m, meshes.homes, Experts(meshes), src_data_rank=None)


def sharded_experts(module: nn.Module) -> list[nn.Module]:
    """Returns the experts of a model that :func:`shard_experts` has divided, but for those of other stages."""
    divided = [m for m in module.modules() if isinstance(getattr(m, "tensor_style", None), Experts)]
    return [m for m in divided if any(True for _ in m.parameters())]


@contextlib.contextmanager
def exchanging_nothing() -> Iterator[None]:
    """Inside this context, no tokens are sent to other ranks; see Note: [Runs of one rank alone]."""
    token = _is_alone.set(True)
    try:
        yield
    finally:
        _is_alone.reset(token)


def _exchanges() -> bool:
    """Whether tokens are sent to the ranks that hold their experts."""
    return not _is_alone.get()


class TokenExchange:
    """The plan of one exchange. All ranks of the group have to make and use it at the same time.

    The host waits for the device once, for the numbers that follow from the choices of all ranks.

    Args:
        choices: How many experts on each rank of the group each token has chosen, `[tokens, ranks]`.
        group: The ranks.

    Attributes:
        received_choices: How many of the choices of all ranks are experts of this rank.
    """

    def __init__(self, choices: Tensor, group: dist.ProcessGroup) -> None:
        self._group, self._tokens = group, len(choices)
        wanted = choices > 0
        mine = torch.stack([wanted.sum(0), choices.sum(0)], dim=1)
        theirs = torch.empty_like(mine)
        dist.all_to_all_single(theirs, mine, group=group)
        sent, (received, chosen) = torch.stack([mine, theirs]).transpose(1, 2).tolist()
        self._sent, self._received, self.received_choices = sent[0], received, sum(chosen)
        # Ordered by rank. They stay on the device until the backward, like the choice of experts.
        self._sources = torch.nonzero_static(wanted.t(), size=sum(self._sent))[:, 1].int()

    def send(self, x: Tensor) -> Tensor:
        """Returns the rows `[received, ...]` that other ranks and this one need here, of `x` `[tokens, ...]`."""
        rows: Tensor = _AllToAll.apply(x.index_select(0, self._sources), self._sent, self._received, self._group)
        return rows

    def give_back(self, results: Tensor) -> Tensor:
        """Returns the sum of the results of each token, `[tokens, ...]`, of those of the received rows."""
        total: Tensor = _GiveBack.apply(results, self)
        return total


def _exchange(x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    result = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(result, x.contiguous(), received, sent, group=group)
    return result


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.counts = sent, received, group
        return _exchange(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received, group = ctx.counts
        return _exchange(gradient, received, sent, group), None, None, None


class _GiveBack(torch.autograd.Function):
    """The opposite of sending: an all-to-all, and a sum over the ranks that a token was sent to."""

    @staticmethod
    def forward(ctx: Any, results: Tensor, plan: TokenExchange) -> Tensor:
        ctx.plan = plan
        rows = _exchange(results, plan._received, plan._sent, plan._group)
        return rows.new_zeros(plan._tokens, *rows.shape[1:]).index_add_(0, plan._sources, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        plan = ctx.plan
        return _exchange(gradient.index_select(0, plan._sources), plan._sent, plan._received, plan._group), None
