"""ZeRO: parameters, gradients and optimizer state shared by the processes that hold the same weights.

Note: [ZeRO by FSDP2]
Each layer is one unit, each child of the module another, of what is left in it, and the module is the root of the
rest. Layers differ by stage in what they do around a step; the others are whole all through it:

| stage | parameters after the forward | gradients of a micro-batch that is not the last |
| --- | --- | --- |
| 0 | whole, always (`replicate`) | kept, whole |
| 1 | whole until the optimizer steps | kept, whole |
| 2 | whole until the optimizer steps | reduced and scattered |
| 3 | given back, gathered again for the backward | reduced and scattered |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
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
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState


def shard_state(
    module: nn.Module,
    layers: Sequence[nn.Module],
    mesh: DeviceMesh,
    stage: int,
    mixed_precision: bool,
    offload: bool,
    forwards: Sequence[str] = (),
) -> None:
    """Shard a module's parameters, gradients and optimizer state, in place.

    Gradients are summed over the processes and divided by their number, so every process's loss has to be its share of
    the whole times that number.

    Args:
        module: What is trained.
        layers: Its repeated layers.
        mesh: One dimension: the processes that hold the same weights.
        stage: ZeRO stage.
        mixed_precision: Compute in bf16, with fp32 weights for the optimizer; else as the weights are.
        offload: State lives on the host, and the optimizer runs there.
        forwards: Methods of `module` that are called from outside, like forwards.
    """
    home = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if offload else OffloadPolicy()
    # Units of their own, so that each forward within a step finds their weights, also after a backward.
    children = [m for m in module.children() if not _is_container(m) and any(True for _ in m.parameters())]
    for unit in [*layers, *(m for m in children if m not in layers), module]:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if mixed_precision else None,
            reduce_dtype=torch.float32,
            cast_forward_inputs=unit is not module,  # the root's input is the batch: counts and targets stay exact
        )
        if stage == 0:
            replicate(unit, mesh=mesh, mp_policy=policy, offload_policy=home)
        else:
            # What is outside of layers (embedding, head) is used at both ends of a step, and never worth giving back.
            again = stage == 3 and unit in layers
            fully_shard(unit, mesh=mesh, reshard_after_forward=again, mp_policy=policy, offload_policy=home)
    for unit in fsdp_units(module):
        # gloo has no average, and NCCL's premultiplied sum is wrong for some sizes: sum, then divide.
        unit.set_force_sum_reduction_for_comms(True)
    for name in forwards:
        register_fsdp_forward_method(module, name)


@contextlib.contextmanager
def as_one_forward(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, all calls of a layer are one forward to FSDP2, which would gather weights and reduce gradients for each.

    Weights are gathered at entry, and gradients are reduced together, when the backward of the root is over: in the
    same order on every process, however many calls there were.
    """
    units = fsdp_units_among(layers)
    states = [unit._get_fsdp_state() for unit in units]
    for unit, state in zip(units, states, strict=True):
        unit.unshard()
        state._training_state = TrainingState.PRE_BACKWARD  # as in a recomputation: its hooks only cast
    try:
        yield
    finally:
        for state in states:
            state._training_state = TrainingState.IDLE


def _is_container(module: nn.Module) -> bool:
    """Whether a module has no forward, which FSDP2 needs."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def forget_unfinished(module: nn.Module) -> None:
    """Drop what an interrupted backward or accumulation left in FSDP2, which `zero_grad` does not reach."""
    for unit in fsdp_units(module):
        unit.reshard()
        state = unit._get_fsdp_state()
        state._training_state = TrainingState.IDLE
        context = state._state_ctx
        context.post_backward_final_callback_queued, context.iter_forward_root = False, None
        for group in _parameter_groups(state):
            group._training_state = TrainingState.IDLE
            group.comm_ctx.post_forward_order.clear()
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def _parameter_groups(state: Any) -> list[Any]:
    """The groups of a unit: newer versions of PyTorch have several."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    """The units of a sharded module; none if it is not sharded."""
    return fsdp_units_among(module.modules())


def fsdp_units_among(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """Those modules that are units themselves."""
    return [unit for unit in modules if isinstance(unit, FSDPModule)]


@contextlib.contextmanager
def accumulating(module: nn.Module, stage: int) -> Iterator[None]:
    """Inside, backwards are not the last of an optimizer step: no collective that the stage can do without."""
    units = fsdp_units(module)
    for unit in units:
        unit.set_requires_gradient_sync(stage >= 2, recurse=False)
        unit.set_reshard_after_backward(stage == 3, recurse=False)
    try:
        yield
    finally:
        for unit in units:
            unit.set_requires_gradient_sync(True, recurse=False)
            unit.set_reshard_after_backward(True, recurse=False)
