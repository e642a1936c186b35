"""The units of FSDP2 of a sharded module, and what they do in a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

# What the groups of parameters do in a backward.
_IN_BACKWARD = ("reduce_grads", "all_reduce_grads", "reshard_after_backward")


def forget_unfinished(module: nn.Module) -> None:
    """Reset the state that an interrupted backward or accumulation left in FSDP2.

    `zero_grad` does not reach unsharded accumulated gradients.
    """
    for unit in fsdp_units(module):
        state = unit._get_fsdp_state()
        for group in parameter_groups(state):
            group.wait_for_unshard()  # what was gathered for a backward that did not come
        unit.reshard()
        state._training_state = TrainingState.IDLE
        context = state._state_ctx
        context.post_backward_final_callback_queued, context.iter_forward_root = False, None
        for group in parameter_groups(state):
            group._training_state = TrainingState.IDLE
            group.comm_ctx.post_forward_order.clear()
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None


def forget_gathered(module: nn.Module) -> None:
    """Free gathered weights after a step of an optimizer, which has changed the shards.

    A forward between the backward and this step (an evaluation in a hook) may have left weights gathered.
    """
    for unit in fsdp_units(module):
        unit.reshard()


def parameter_groups(state: Any) -> list[Any]:
    """Returns the parameter groups of a unit; newer versions of PyTorch have several."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def fsdp_units(module: nn.Module) -> list[FSDPModule]:
    """Returns the FSDP2 units of a module, none if it is not sharded."""
    return fsdp_units_among(module.modules())


def fsdp_units_among(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """Returns those of the modules that are FSDP2 units."""
    return [unit for unit in modules if isinstance(unit, FSDPModule)]


@contextlib.contextmanager
def accumulating(module: nn.Module, stage: int) -> Iterator[None]:
    """Within this context backwards are not the last of an optimizer step, and run only the collectives they need.

    Args:
        module: Sharded module.
        stage: ZeRO stage.
    """
    units = fsdp_units(module)
    groups = [group for unit in units for group in parameter_groups(unit._get_fsdp_state())]
    before = [[getattr(group, name) for name in _IN_BACKWARD] for group in groups]  # this context may be in another one
    for unit in units:
        unit.set_requires_gradient_sync(stage >= 2, recurse=False)
        unit.set_reshard_after_backward(stage == 3, recurse=False)
    try:
        yield
    finally:
        for group, values in zip(groups, before, strict=True):
            for name, value in zip(_IN_BACKWARD, values, strict=True):
                setattr(group, name, value)


@contextlib.contextmanager
def as_one_forward(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Within this context FSDP2 sees all calls of a layer as one forward.

    Otherwise it would gather weights and reduce gradients for each call. Weights are gathered at entry. Gradients are
    reduced at the end of the root's backward, in the same order on every rank, whatever the number of calls.

    Args:
        layers: Layers that are called repeatedly.
    """
    units = fsdp_units_among(m for layer in layers for m in layer.modules())  # experts are units of their own
    states = [unit._get_fsdp_state() for unit in units]
    for unit, state in zip(units, states, strict=True):
        unit.unshard()
        state._training_state = TrainingState.PRE_BACKWARD  # as in a recomputation: its hooks only cast
    try:
        yield
    finally:
        for state in states:
            state._training_state = TrainingState.IDLE
