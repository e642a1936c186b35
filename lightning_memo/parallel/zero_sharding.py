"""ZeRO: parameters, gradients and optimizer state are sharded over the ranks that hold the same weights.

Note: [ZeRO by FSDP2]
Each layer is one FSDP2 unit; experts that are divided over ranks are another one, because fewer ranks hold the same
ones. Each child of the module is another unit with its remaining parameters, and the module is the root unit with the
rest. The stages differ in what layers do around a step; the other units stay gathered all through the step:

| stage | parameters after the forward | gradients of a micro-batch that is not the last |
| --- | --- | --- |
| 0 | always whole (`replicate`) | kept whole |
| 1 | whole until the optimizer steps | kept whole |
| 2 | whole until the optimizer steps | reduce-scattered |
| 3 | resharded, gathered again for the backward | reduce-scattered |

With a shard size, stage 3 shards weights after the forward over neighbours only, such as the GPUs of a node, which then
gather them for the backward among themselves (ZeRO++'s secondary partition).

Note: [Error of what is sent]
Weights and gradients may be sent as integers of 8 or 4 bits, in blocks with a scale each (ZeRO++). Let a be the largest
magnitude in a block of 128 values. Each of them arrives within a / 254 with 8 bits, and within a / 14 with 4 bits. All
ranks compute with the same weights, those that have arrived. A gradient is the sum of this rank's exact part and of the
parts that have arrived, added in fp32: of W ranks, the error is at most that of W - 1 parts. A block with a NaN or an
infinity arrives as values that are not finite.

Neighbours that hold shards of gathered weights between forward and backward send each other exact values: these have
been rounded before. Rounded again in other blocks, the weights of the backward would not be those of the forward.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from lightning_memo.parallel.collectives import all_gather_single
from lightning_memo.parallel.device_mesh import ExpertMeshes
from lightning_memo.parallel.fsdp_units import fsdp_units, parameter_groups
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.parallel.parallel_sizes import BLOCK, GRADIENT_BITS, SCALE_BYTES, WEIGHT_BITS, sent_bytes
from lightning_memo.parallel.tensor.experts import sharded_experts
from lightning_memo.utils.around_forward import is_in_backward

_WITH_LAYER = "_lightning_memo_with_layer"

# Attribute of FSDP2's description of a parameter: the node that adds to the gradient of the shard.
_ACCUMULATES = "_lightning_memo_accumulates"


@dataclass(frozen=True, slots=True)
class ZeroSettings:
    """Settings of ZeRO, as those of the strategy that begin with `zero_`.

    Attributes:
        stage: The stage, 0 to 3.
        neighbours: The ranks with the same weights as a mesh with two dimensions. Stage 3 shards weights over the last
            one between forward and backward; `None` for all ranks.
        communication: How weights and gradients are sent.
    """

    stage: int
    neighbours: DeviceMesh | None = None
    communication: str = "none"


def shard_state(
    module: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    zero: ZeroSettings,
    mixed_precision: bool,
    offload: bool,
    forwards: Sequence[str] = (),
    experts: ExpertMeshes | None = None,
) -> None:
    """Shard a module's parameters, gradients and optimizer state, in place.

    Gradients are averaged over the ranks. The loss of each rank must therefore be its part of the whole loss times the
    number of ranks.

    Args:
        module: Module that is trained.
        layers: Repeated layers of the module.
        mesh: Mesh with one dimension, the ranks that hold the same weights.
        zero: Settings of ZeRO.
        mixed_precision: Compute in bf16, with fp32 weights for the optimizer. Otherwise computation uses the dtype of
            the weights.
        offload: Keep parameters and optimizer state on the host, and run the optimizer there.
        forwards: Names of methods of `module` that use its parameters, besides `forward`.
        experts: Where experts are that are divided over the ranks of `mesh`; `None` if they are not.

    Raises:
        ValueError: The weights of experts cannot be sharded evenly.
    """
    # Units of their own, so that their weights are gathered for each forward within a step, also after a backward.
    children = [m for m in module.children() if not _is_container(m) and any(True for _ in m.parameters())]
    # A parameter belongs to one unit: layers that share parameters (Zamba) are left to the module around them.
    users = Counter(id(p) for layer in layers for p in layer.parameters())
    alone = [layer for layer in layers if all(users[id(p)] == 1 for p in layer.parameters())]
    make_unit = functools.partial(_make_unit, stage=zero.stage, mixed_precision=mixed_precision, offload=offload)
    owners = {} if experts is None else _make_units_of_experts(module, alone, experts, make_unit)
    for unit in [*alone, *(m for m in children if m not in layers), module]:
        # Units outside the layers (embedding, head) are used at both ends of a step, so they stay gathered.
        make_unit(unit, mesh, zero.neighbours, again=unit in layers, casts=unit is not module)
        if zero.stage == 3 and unit in layers:
            unit.register_forward_hook(functools.partial(_expect_no_backward, unit))
    for unit, owner in owners.items():
        if owner is not None:
            _gather_with(unit, owner, again=zero.stage == 3)
    _set_communication(fsdp_units(module), zero.communication)
    for unit in fsdp_units(module):
        _order_gradients(unit)
    for name in forwards:
        register_fsdp_forward_method(module, name)


def _set_communication(units: Iterable[FSDPModule], communication: str) -> None:
    for unit in units:
        # gloo has no average, and NCCL's premultiplied sum is wrong for some sizes: sum, then divide.
        unit.set_force_sum_reduction_for_comms(True)
        if communication != "none":
            send_quantised(unit, communication)


def _order_gradients(unit: FSDPModule) -> None:
    """Let autograd wait for reductions before it adds to gradients of shards itself.

    It does so for terms of the loss that are computed from weights. FSDP2 writes reduced gradients on a stream of its
    own, and would overwrite those of a term that was computed before the model.
    """
    for group in parameter_groups(unit._get_fsdp_state()):
        for of in group.fsdp_params:
            trained = of.sharded_param.requires_grad
            of.sharded_param.requires_grad_(True)  # weights may be trained later on
            node = get_gradient_edge(of.sharded_param).node  # a hook on the tensor would be taken for one of a user's
            node.register_prehook(functools.partial(_wait_for_reduction, group))
            setattr(of, _ACCUMULATES, node)  # the tensor does not keep it
            of.sharded_param.requires_grad_(trained)


def _wait_for_reduction(group: Any, gradients: tuple[Tensor, ...]) -> None:
    if group._post_reduce_event is not None:
        group.device_handle.current_stream().wait_event(group._post_reduce_event)


def _make_unit(
    unit: nn.Module,
    mesh: DeviceMesh,
    neighbours: DeviceMesh | None,
    *,
    stage: int,
    mixed_precision: bool,
    offload: bool,
    again: bool,
    casts: bool,
    place: Callable[[nn.Parameter], Shard | None] | None = None,
) -> None:
    """Make a module a unit of FSDP2.

    Args:
        unit: The module.
        mesh: The ranks that hold its weights.
        neighbours: These ranks, as in `ZeroSettings`.
        stage: ZeRO stage.
        mixed_precision: As for `shard_state`.
        offload: As for `shard_state`.
        again: Whether stage 3 frees its weights after the forward, and gathers them again for the backward.
        casts: Whether inputs are cast to the dtype of computation. The root's input is the batch, with counts and
            targets.
        place: Returns the dimension in which a weight is sharded; `None` for the first one.
    """
    home = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed_precision else None,
        reduce_dtype=torch.float32,
        cast_forward_inputs=casts,
    )
    packed = {p for p in unit.parameters() if _is_packed(p)}
    if stage == 0:
        replicate(unit, mesh=mesh, mp_policy=policy, offload_policy=home, ignored_params=packed)
        return
    after = again and stage == 3
    fully_shard(
        unit, mesh=mesh, reshard_after_forward=after, shard_placement_fn=place, mp_policy=policy, offload_policy=home,
        ignored_params=packed,
    )  # fmt: skip
    if after and neighbours is not None:
        _shard_over_neighbours(unit, neighbours)


def _is_packed(p: nn.Parameter) -> bool:
    """Whether a weight is quantised and frozen.

    Each rank has all of it: a shard would lose the scales that bitsandbytes keeps as attributes, and torchao's weights
    do not divide.
    """
    is_wrapper = is_traceable_wrapper_subclass(p) and not isinstance(p, DTensor)
    return not p.is_floating_point() or (is_wrapper and not p.requires_grad)


def _shard_over_neighbours(unit: nn.Module, neighbours: DeviceMesh) -> None:
    """Shard the weights of a unit over neighbours between forward and backward.

    `fully_shard` with a number of ranks would make process groups for each unit. They are made by all processes of a
    run, and stages of a pipeline have different units.

    Args:
        unit: A unit of FSDP2 that frees its weights after the forward.
        neighbours: The ranks that hold the weights, as a mesh with two dimensions, of which the last one is neighbours.
    """
    info = HSDPMeshInfo(neighbours, shard_mesh_dim=1, replicate_mesh_dim=0)
    for group in parameter_groups(unit._get_fsdp_state()):
        group.post_forward_mesh_info = info
        for of in group.fsdp_params:
            _NeighbourShard(of, info)


class _NeighbourShard:
    """The part of a weight that this rank keeps for its neighbours between forward and backward.

    FSDP2 gives the module a DTensor of this part. It does not name the tensor-parallel ranks, and gradients of terms of
    the loss that are computed from weights are lost with it. Here the module has the optimizer's shard meanwhile, as
    without neighbours.

    Args:
        of: FSDP2's own description of the parameter, whose transitions are replaced.
        info: The neighbours.
    """

    def __init__(self, of: Any, info: HSDPMeshInfo) -> None:
        self._of = of
        self._info = info
        self._place = of.fsdp_placement
        of.post_forward_mesh_info = info
        of.to_sharded_post_forward = self._keep
        of.to_unsharded = self._use
        of.to_sharded = self._drop

    def _keep(self) -> None:
        """Free a whole weight, but not this rank's part of it."""
        of, info = self._of, self._info
        of._sharded_post_forward_param_data = (
            of.all_gather_outputs[0].chunk(info.shard_mesh_size)[info.shard_mesh_rank].clone()
        )
        type(of).to_sharded(of)
        of.sharded_state = ShardedState.SHARDED_POST_FORWARD
        of.fsdp_placement = Shard(0)  # parts of it in memory

    def _use(self) -> None:
        """Give the module the whole weight, which has been gathered."""
        type(self._of).to_unsharded(self._of)
        self._of.fsdp_placement = self._place

    def _drop(self) -> None:
        """Free the weight, or the part of it."""
        self._of._sharded_post_forward_param_data = None
        self._of.fsdp_placement = self._place
        type(self._of).to_sharded(self._of)


def _make_units_of_experts(
    module: nn.Module, layers: Iterable[nn.Module], experts: ExpertMeshes, make_unit: Callable[..., None]
) -> dict[nn.Module, nn.Module | None]:
    """Make divided experts units of FSDP2. Returns them with the layer that each belongs to; `None` for no layer."""
    of_layer = {m: layer for layer in layers for m in layer.modules()}
    owners = {m: of_layer.get(m) for m in sharded_experts(module)}
    for unit, owner in owners.items():
        place = _evenly(experts.replicas)
        make_unit(unit, experts.replicas, experts.neighbours, again=owner is not None, casts=False, place=place)
        # The gradients are sums over the tokens of all ranks that share experts.
        unit.set_all_reduce_hook(functools.partial(_divide, by=experts.exchange.size()))
    return owners


def _evenly(mesh: DeviceMesh) -> Callable[[nn.Parameter], Shard | None]:
    """Returns how the weights of experts are sharded: in the first dimension that the number of ranks divides."""

    def place(parameter: nn.Parameter) -> Shard:
        """Raises a `ValueError` if there is no such dimension."""
        sizes = local_part(parameter).shape
        for dim, size in enumerate(sizes):
            if size % mesh.size() == 0:
                return Shard(dim)
        raise ValueError(
            f"zero_stage: {mesh.size()} processes hold the same experts, and their number divides no size of a weight "
            f"of {list(sizes)}: set zero_stage=0, or a larger expert_parallel_size"
        )

    return place


def _divide(gradients: Tensor, by: int) -> None:
    gradients.div_(by)
    if gradients.is_cuda:
        # FSDP2 runs this on the stream of its all-reduces, and frees the tensor there once it is added to the
        # gradients of earlier micro-batches. The memory is that of another stream, where the next layer would take it.
        gradients.record_stream(torch.cuda.current_stream())


def _gather_with(unit: FSDPModule, layer: nn.Module, again: bool) -> None:
    """Gather the weights of a module in a layer with those of the layer, which calls the module once for each slice.

    Args:
        unit: The module.
        layer: The layer, a unit itself.
        again: Whether the weights are freed after the forward.
    """
    state = unit._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = layer.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
    state._post_forward_hook_handle = layer.register_forward_hook(state._post_forward)
    if again:
        layer.register_forward_hook(functools.partial(_expect_no_backward, unit))
    setattr(unit, _WITH_LAYER, True)


def gathers_itself(module: nn.Module) -> bool:
    """Whether a module is a unit of FSDP2 whose weights are gathered for each of its own forwards."""
    return isinstance(module, FSDPModule) and not hasattr(module, _WITH_LAYER)


def _expect_no_backward(unit: FSDPModule, layer: nn.Module, inputs: Any, output: Any) -> None:
    """Leave a forward without gradients out of what FSDP2 expects a backward of.

    Otherwise the backward of the next layer would gather the unit's weights once more, and nothing would use them: a
    frozen layer below those that are trained, or a pass under `torch.no_grad()`. Their memory would be freed while it
    is still written.
    """
    nothing_recorded = is_in_backward()
    if nothing_recorded or any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(output)):
        return
    for group in parameter_groups(unit._get_fsdp_state()):
        order = group.comm_ctx.post_forward_order
        if order and order[-1] is group:
            order.pop()
            group._post_forward_indices.pop()


def _is_container(module: nn.Module) -> bool:
    """Whether a module is a container without a forward, which FSDP2 cannot wrap."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def send_quantised(unit: FSDPModule, communication: str) -> None:
    """Send the weights of an FSDP2 unit with 8 bits, and their gradients with 8 or 4 bits.

    Weights that have several dtypes are sent as they are.

    Args:
        unit: The unit.
        communication: "int8" or "int4", for gradients.
    """
    ranks = max((group.mesh_info.shard_mesh_size for group in parameter_groups(unit._get_fsdp_state())), default=1)
    unit.set_custom_all_gather(QuantisedAllGather(ranks))
    unit.set_custom_reduce_scatter(QuantisedReduceScatter(GRADIENT_BITS[communication]))


class Quantised:
    """Values as integers of 8 or 4 bits in blocks.

    Args:
        sent: Bytes, `[sent_bytes(values, bits)]`: the integers of all blocks, and then their scales in fp32.
        values: Number of values.
        bits: 8 or 4.
    """

    def __init__(self, sent: Tensor, values: int, bits: int) -> None:
        self._values = values
        self._bits = bits
        blocks = -(-values // BLOCK)
        integers, scales = sent.split([blocks * BLOCK * bits // 8, blocks * SCALE_BYTES])
        self._integers = integers.view(torch.int8).view(blocks, -1)
        self._scales = scales.view(torch.float32)[:, None]

    def write(self, t: Tensor) -> None:
        """Write values, `[values]`."""
        first = 0
        for part in _value_blocks(t):
            rows = slice(first, first + len(part))
            scales = torch.linalg.vector_norm(part, math.inf, 1, keepdim=True, dtype=torch.float32)
            scales /= 2 ** (self._bits - 1) - 1
            rounded = (part / torch.where(scales == 0, 1.0, scales)).round_()
            self._integers[rows] = rounded if self._bits == 8 else _two_in_one(rounded.to(torch.int8))
            self._scales[rows] = scales
            first += len(part)

    def read(self, out: Tensor) -> None:
        """Read the values into a tensor, `[values]`."""
        whole, rest = self._split(out)
        integers = self._all_integers()
        torch.mul(integers[: len(whole)], self._scales[: len(whole)], out=whole)  # in one pass, whatever the dtype
        if len(rest):
            rest.copy_((integers[-1] * self._scales[-1])[: len(rest)])

    def add_to(self, sums: Tensor) -> None:
        """Add the values to sums in fp32, `[values]`."""
        whole, rest = self._split(sums)
        integers = self._all_integers()
        whole.addcmul_(integers[: len(whole)], self._scales[: len(whole)])
        if len(rest):
            rest += (integers[-1] * self._scales[-1])[: len(rest)]

    def _split(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """View whole blocks, `[blocks, BLOCK]`, and the rest."""
        whole = self._values // BLOCK * BLOCK
        return t[:whole].view(-1, BLOCK), t[whole:]

    def _all_integers(self) -> Tensor:
        """Return an integer for each value, `[blocks, BLOCK]`."""
        if self._bits == 8:
            return self._integers
        # An arithmetic shift extends the sign.
        return torch.stack([(self._integers << 4) >> 4, self._integers >> 4], -1).view(-1, BLOCK)


def _value_blocks(t: Tensor) -> Iterator[Tensor]:
    """Yield whole blocks, and the rest of the values with zeros behind them, each `[blocks, BLOCK]`.

    Args:
        t: The values, `[values]`.
    """
    whole = len(t) // BLOCK * BLOCK
    if whole:
        yield t[:whole].view(-1, BLOCK)
    if whole < len(t):
        yield functional.pad(t[whole:], (0, whole + BLOCK - len(t)))[None]


def _two_in_one(integers: Tensor) -> Tensor:
    return (integers[:, ::2] & 15) | (integers[:, 1::2] << 4)


def _quantise(t: Tensor, bits: int) -> Tensor:
    """Return the bytes in which values are sent."""
    sent = t.new_empty(sent_bytes(len(t), bits), dtype=torch.uint8)
    Quantised(sent, len(t), bits).write(t)
    return sent


class _InCallersMemory:
    """Allocates what FSDP2 sends and receives as any other tensor."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantisedAllGather(_InCallersMemory):
    """An all-gather of weights with 8 bits, for `set_custom_all_gather`.

    Args:
        ranks: Number of ranks that hold the weights. What fewer of them gather is sent as it is.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather weights. The call is over, or ordered by the current stream, when it returns.

        Args:
            output_tensor: The weights of all ranks, one after the other.
            input_tensor: The weights of this rank.
            group: The ranks.
            async_op: Not used.
        """
        of_neighbours = group.size() < self._ranks
        if of_neighbours or group.size() == 1 or not input_tensor.is_floating_point():  # bytes of several dtypes
            all_gather_single(output_tensor, input_tensor, group)
            return
        sent = _quantise(input_tensor, WEIGHT_BITS)
        received = sent.new_empty(group.size() * len(sent))
        all_gather_single(received, sent, group)
        for weights, part in zip(output_tensor.chunk(group.size()), received.chunk(group.size()), strict=True):
            Quantised(part, len(weights), WEIGHT_BITS).read(weights)


class QuantisedReduceScatter(_InCallersMemory):
    """A reduce-scatter of gradients with 8 or 4 bits, whose sums are in fp32, for `set_custom_reduce_scatter`."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum gradients over ranks. The call is over, or ordered by the current stream, when it returns.

        Args:
            output_tensor: The sums that belong to this rank.
            input_tensor: This rank's gradients for all ranks, one after the other.
            group: The ranks.
            op: Sum, which `set_force_sum_reduction_for_comms` asks for.
            async_op: Not used.

        Raises:
            ValueError: Another operation is asked for.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"gradients that are sent quantised are summed, not reduced by {op}")
        gradients = input_tensor.view(group.size(), -1)
        sent = torch.stack([_quantise(part, self._bits) for part in gradients])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        output_tensor.copy_(gradients[group.rank()])
        for rank, part in enumerate(received):
            if rank != group.rank():
                Quantised(part, len(output_tensor), self._bits).add_to(output_tensor)


# Attribute of a unit whose weights are gathered with those of the layer around it.
