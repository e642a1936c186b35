"""Tensor-parallel styles: the forward of a module whose weights are split over the ranks, and of the whole model.

Note: [Parameters are DTensors, computation is local]
A parameter is a `DTensor`, so that FSDP2, optimizers and checkpoints know which part of the whole it is. A module's own
forward gets this rank's part as a plain tensor, and only plain tensors pass between modules. Module code, fused kernels
and the engine's slices therefore run as on one device, without the cost of dispatching DTensors. Only `move`, at the
entry of a block and after its last projection, communicates with other ranks.

The stream is the hidden state between blocks. Its layout is `Replicate()`, the same on every rank, or `Shard(1)` with
sequence parallelism, this rank's tokens (Korthikanti et al., "Reducing Activation Recomputation", section 4).
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_memo.parallel.tensor.linear_layers import is_transposed, matrix_of, output_features
from lightning_memo.parallel.tensor.local_shares import FirstArgument, LocalShares
from lightning_memo.parallel.tensor.sharded_logits import sharded_logits
from lightning_memo.utils.retained_graph import first_derivative

STREAM_TOKEN_DIM = 1
Forward = Callable[..., Any]


def move(
    x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement, gradient: Placement | None = None
) -> Tensor:
    """Redistribute a plain tensor from layout `source` to layout `target`; differentiable.

    Args:
        x: This rank's part of the tensor.
        mesh: One-dimensional mesh of the ranks.
        source: Layout of the input over the ranks.
        target: Layout of the result over the ranks.
        gradient: Layout of the result's gradient; `None` for the layout of the result.

    Returns:
        This rank's part of the result.
    """
    whole = DTensor.from_local(x, mesh, [source], run_check=False)
    return whole.redistribute(placements=[target]).to_local(grad_placements=None if gradient is None else [gradient])


def _summed(partial: Tensor, mesh: DeviceMesh, target: Placement) -> Tensor:
    """Returns this rank's part of a sum over the ranks, in memory of its own that the caller may write into."""
    y = move(partial, mesh, Partial(), target)
    # Results of DTensors are views of a function of its own, into which autograd lets nobody write.
    return torch.ops.aten._unsafe_view(y, y.shape)


def _local(parameter: Tensor, gradient: Placement | None = None) -> Tensor:
    """Returns this rank's part of a parameter as a plain view. `gradient` is as in `move`, if it is replicated."""
    assert isinstance(parameter, DTensor)
    if gradient is None or not parameter.placements[0].is_replicate():
        return parameter.to_local()
    return parameter.to_local(grad_placements=[gradient])


@contextmanager
def local_parameters(module: nn.Module, gradient: Placement | None = None) -> Iterator[None]:
    """Within this context the attributes of a module's own parameters are plain local tensors.

    Args:
        module: The module.
        gradient: Layout of the gradients of replicated parameters; `None` for `Replicate()`.

    Instance attributes hide the parameters in the tables of `nn.Module`, which FSDP2 replaces, so the two do not
    conflict. Previous attributes are restored at exit, because a layer may run inside a call of itself.
    """
    attributes = module.__dict__
    hidden = {name: _local(p, gradient) for name, p in module._parameters.items() if p is not None}
    before = {name: attributes[name] for name in hidden if name in attributes}
    attributes.update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            del attributes[name]
        attributes.update(before)


class Styled(nn.Module):
    """Mixed into the class of a module with a style. The style calls the module's own forward."""

    tensor_style: TensorStyle

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.tensor_style.forward(self, super().forward, *args, **kwargs)


@functools.cache
def _styled_class(cls: type[nn.Module]) -> type[nn.Module]:
    return type(f"TensorParallel{cls.__name__}", (Styled, cls), {})


class TensorStyle(ParallelStyle):
    """Splits the parameters of one module and computes with this rank's part."""

    mesh: DeviceMesh

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.mesh = device_mesh
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = self._distribute(parameter, self.placement(module, name))
        self.prepare(module)
        module.tensor_style = self
        # Unlike a replaced method, a class survives copies of the module and FSDP2's subclassing.
        module.__class__ = _styled_class(type(module))
        return module

    def _distribute(self, parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
        part = distribute_tensor(parameter.detach(), self.mesh, [placement], src_data_rank=self.src_data_rank)
        return nn.Parameter(part, requires_grad=parameter.requires_grad)

    def placement(self, module: nn.Module, name: str) -> Placement:
        """Returns the placement of a parameter of a module over the ranks."""
        return Replicate()

    def prepare(self, module: nn.Module) -> None:
        """Adjust size attributes of the module to this rank's part."""

    @abstractmethod
    def forward(self, module: nn.Module, original: Forward, *args: Any, **kwargs: Any) -> Any:
        """Compute the module's output. `original` is its own forward."""


class Replicated(TensorStyle):
    """Keeps whole parameters on every rank.

    Args:
        gradient: Layout of the parameters' gradients over the ranks: `Replicate()` if all ranks compute the same,
            `Partial()` if each rank has its own tokens or heads.
        enters: Layout of an input from the stream that has to be gathered; `None` uses the input unchanged.
        leaves: Layout of the stream to which an output for all tokens is converted; `None` leaves it unchanged.
        everything: Whether parameters of modules inside are plain tensors while the module runs, too: some modules
            compute with parameters of others, which they do not call.
        divided: Names of parameters whose first dimension is split nevertheless, as there is one for each head.
    """

    def __init__(
        self,
        gradient: Placement,
        enters: Placement | None = None,
        leaves: Placement | None = None,
        everything: bool = False,
        divided: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.gradient, self.enters, self.leaves = gradient, enters, leaves
        self.everything, self.divided = everything, divided

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(0) if name in self.divided else Replicate()

    def forward(self, module: nn.Module, original: Forward, *args: Any, **kwargs: Any) -> Any:
        if self.enters is not None:
            args = (move(args[0], self.mesh, self.enters, Replicate(), gradient=Partial()), *args[1:])
        with ExitStack() as stack:
            for m in module.modules() if self.everything else (module,):
                stack.enter_context(local_parameters(m, self.gradient))
            result = original(*args, **kwargs)
        return result if self.leaves is None else move(result, self.mesh, Replicate(), self.leaves)


class Block(TensorStyle):
    """An attention or MLP module. Its input is gathered once for all its projections.

    In the backward each rank first adds up the gradients of the projections. One all-reduce or reduce-scatter follows.

    Args:
        stream: Layout of the stream.
        shares: What of the module counts this rank's heads or features.
        divided: Names of parameters of the module whose first dimension is split. Others are whole.
    """

    def __init__(self, stream: Placement, shares: LocalShares | None = None, divided: Collection[str] = ()) -> None:
        super().__init__()
        self.stream, self.shares, self.divided = stream, shares or LocalShares(), divided
        self._input: Tensor | None = None

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(0) if name in self.divided else Replicate()

    def prepare(self, module: nn.Module) -> None:
        self._call_with = FirstArgument(module)
        vars(module).update(self.shares.values(module, self.mesh.size()))

    def forward(self, module: nn.Module, original: Forward, *args: Any, **kwargs: Any) -> Any:
        before = self._input

        def gather(x: Tensor) -> Tensor:
            self._input = move(x, self.mesh, self.stream, Replicate(), gradient=Partial())
            return self._input

        try:
            with local_parameters(module, Partial()):
                return self._call_with(gather, original, *args, **kwargs)
        finally:
            self._input = before

    def check(self, x: Tensor, module: nn.Module) -> None:
        """Raise if a projection's input is not the block's input. Its gradient would lack the other ranks' parts."""
        if x is not self._input:
            raise ValueError(
                f"tensor parallelism cannot split {module}: its input is not the input of the module that contains it; "
                'give it the style "replicated", or remove the module from the plan'
            )


class Colwise(TensorStyle):
    """A column-wise linear layer: each rank computes some output features.

    Args:
        source: Source of the input: the block of the layer, the layout of the stream, or `None` for a tensor that
            needs no communication, like the output of an adapter's first factor.
        output: Form of the output: `"local"`, `"gathered"` on every rank, or `"divided"`: logits that are split in the
            last dimension.
    """

    def __init__(self, source: Block | Placement | None, output: str = "local") -> None:
        super().__init__()
        self.source, self.output = source, output

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(int(name == "weight" and is_transposed(module)))

    def forward(self, module: nn.Module, original: Forward, x: Tensor) -> Any:
        if isinstance(self.source, Block):
            self.source.check(x, module)
        elif self.source is not None:
            x = move(x, self.mesh, self.source, Replicate(), gradient=Partial())
        y = self.project(module, x)
        if self.output == "local":
            return y
        whole = sharded_logits(y, self.mesh, output_features(module))
        return whole if self.output == "divided" else whole.redistribute(placements=[Replicate()]).to_local()

    def project(self, module: nn.Module, x: Tensor) -> Tensor:
        weight = matrix_of(module, _local(module.weight))
        return F.linear(x, weight, None if module.bias is None else _local(module.bias))


class Rowwise(TensorStyle):
    """A row-wise linear layer: input features are split over the ranks, and outputs are summed.

    Args:
        stream: Layout of the output.
        split_input: Whether the input is whole, so that each rank takes its features from it.
    """

    def __init__(self, stream: Placement, split_input: bool = False) -> None:
        super().__init__()
        self.stream, self.split_input = stream, split_input

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(int(not is_transposed(module))) if name == "weight" else Replicate()

    def forward(self, module: nn.Module, original: Forward, x: Tensor) -> Tensor:
        if self.split_input:
            x = move(x, self.mesh, Replicate(), Shard(x.dim() - 1))
        partial = F.linear(x, matrix_of(module, _local(module.weight)))
        y = _summed(partial, self.mesh, self.stream)
        if module.bias is None:
            return y
        return y + _local(module.bias, gradient_of_replica(self.stream)).to(y.dtype)


class VocabularyParallel(TensorStyle):
    """An embedding table whose rows are split over the ranks. Each rank looks up its ids, and the results are summed.

    Args:
        stream: Layout of the output.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def placement(self, module: nn.Module, name: str) -> Placement:
        return Shard(0)

    def prepare(self, module: nn.Module) -> None:
        chunk = -(-module.num_embeddings // self.mesh.size())
        self._first, self._rows = chunk * self.mesh.get_local_rank(), module.weight.to_local().shape[0]
        if module.padding_idx is not None:
            padding = module.padding_idx - self._first
            module.padding_idx = padding if 0 <= padding < self._rows else None

    def forward(self, module: nn.Module, original: Forward, ids: Tensor) -> Tensor:
        unknown = (ids < self._first) | (ids >= self._first + self._rows)
        with local_parameters(module):
            found = original((ids - self._first).masked_fill(unknown, 0))
        return _summed(found.masked_fill(unknown[..., None], 0), self.mesh, self.stream)


def gradient_of_replica(stream: Placement) -> Placement:
    """Returns the layout of the gradient of a replicated parameter that is applied to the stream."""
    return Replicate() if stream.is_replicate() else Partial()


class WholeModel(TensorStyle):
    """A whole Hugging Face model. Users compute with its outputs, and the same on every rank.

    Its loss becomes a plain tensor: that of transformers' loss function at once, because models add losses of their
    routers to it, which are plain. Hidden states between blocks are gathered if each rank has some of the tokens.

    Args:
        stream: Layout of the stream.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def forward(self, module: nn.Module, original: Forward, *args: Any, **kwargs: Any) -> Any:
        as_tuple = kwargs.get("return_dict") is False
        with self._plain_loss_function(module):
            result = original(*args, **(kwargs | {"return_dict": True} if as_tuple else kwargs))
        if isinstance(getattr(result, "loss", None), Tensor):
            result.loss = _plain(result.loss)
        states = getattr(result, "hidden_states", None)
        if self.stream.is_shard() and isinstance(states, tuple):
            result.hidden_states = tuple(move(t, self.mesh, self.stream, Replicate()) for t in states)
        return result.to_tuple() if as_tuple else result

    @contextmanager
    def _plain_loss_function(self, module: nn.Module) -> Iterator[None]:
        inner, own = getattr(module, "loss_function", None), vars(module).get("_loss_function")
        if inner is None:
            yield
            return

        def loss_function(*args: Any, **kwargs: Any) -> Any:
            loss = inner(*args, **kwargs)
            return _plain(loss) if isinstance(loss, Tensor) else loss

        vars(module)["_loss_function"] = functools.wraps(inner)(loss_function)
        try:
            yield
        finally:
            del vars(module)["_loss_function"]
            if own is not None:
                vars(module)["_loss_function"] = own


def _plain(loss: Tensor) -> Tensor:
    result: Tensor = _PlainGradient.apply(loss.full_tensor() if isinstance(loss, DTensor) else loss)
    return result


class _PlainGradient(torch.autograd.Function):
    """A copy whose gradient is a plain tensor, also if a user adds it to a function of weights or logits."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()  # no view, which `+=` needs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


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
        rows = held.new_empty(held.shape)  # contiguous, also if the weight is stored transposed
        dist.all_to_all_single(rows, held[self._order].contiguous(), self._received, self._sent, group=self._group)
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
        weight = matrix_of(module, _local(module.weight))
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
        y = _PackedLinear.apply(x, weight, self.exchange)
        return y if module.bias is None else y + _Fetch.apply(_local(module.bias), self.exchange).to(y.dtype)
