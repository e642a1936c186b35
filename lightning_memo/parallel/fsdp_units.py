"""The units of FSDP2 of a sharded module in a step, and in a pipeline, where backwards run between forwards.

Note: [Backwards inside of a forward]
FSDP2 takes the end of a backward for the end of a step. In a pipeline, the model's call goes on, and what FSDP2 notes
of forwards is put right:

- While ZeRO 3 computes the backward of a layer, FSDP2 gathers the weights of the layer before it, by the order of the
  forwards since the last backward. These would be forwards of later micro-batches, and at the end of a batch there are
  none. The order is taken after each forward, and given back before the backward of the same micro-batch.
- Units around the layers (embedding, head) are in a forward of their own, in which their weights stay gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

# Attributes of groups of parameters that decide about their collectives in a backward.
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
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None
                if parameter.unsharded_accumulated_grad is not None:  # before PyTorch 2.15, this may be another tensor
                    parameter.unsharded_accumulated_grad = None
            if hasattr(group, "_set_unsharded_grad_dtypes"):  # since PyTorch 2.15, a backward changes these dtypes
                group._set_unsharded_grad_dtypes(defer_upcast=False)


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
    return _units_among(module.modules())


def _units_among(modules: Iterable[nn.Module]) -> list[FSDPModule]:
    """Returns the FSDP2 units among modules."""
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
    units = _units_among(m for layer in layers for m in layer.modules())  # experts are units of their own
    states = [unit._get_fsdp_state() for unit in units]
    for unit, state in zip(units, states, strict=True):
        unit.unshard()
        state._training_state = TrainingState.PRE_BACKWARD  # as in a recomputation: its hooks only cast
    try:
        yield
    finally:
        for state in states:
            state._training_state = TrainingState.IDLE


@contextlib.contextmanager
def gathered_within_backward(layer: nn.Module) -> Iterator[None]:
    """Within this context the weights of a layer are gathered, while the backward of another layer runs.

    Args:
        layer: The layer, which may contain units, such as experts.
    """
    units = fsdp_units(layer)
    needed = [_is_gathered(unit) for unit in units]  # by the backward that runs, or ahead of the next one
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit, stays in zip(units, needed, strict=True):
            if not stays:
                unit.reshard()


def _is_gathered(unit: FSDPModule) -> bool:
    """Returns whether FSDP2 has gathered the weights of a unit, or has begun to."""
    groups = parameter_groups(unit._get_fsdp_state())
    return any(group.is_unsharded or group._all_gather_result is not None for group in groups)


class UnitsInFlight:
    """The units of FSDP2 of a pipeline stage; see Note: [Backwards inside of a forward].

    Args:
        module: The module that is trained, whose weights have been sharded by FSDP2 or not at all.
        zero_stage: ZeRO stage.
    """

    def __init__(self, module: nn.Module, zero_stage: int) -> None:
        self._module = module
        self._zero_stage = zero_stage
        # Inner units first, as a model may be called without the module around it.
        self._states: list[Any] = [unit._get_fsdp_state() for unit in reversed(fsdp_units(module))]
        self._groups = [group for state in self._states for group in parameter_groups(state)]

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within this context backwards are not the last ones of an optimizer step, nor of the model's call."""
        with accumulating(self._module, self._zero_stage):
            for group in self._groups:
                group.reshard_after_backward = group._reshard_after_forward
            yield

    def take_forward(self) -> list[Any]:
        """Return the groups of parameters in the order of the forward of a micro-batch, which has run just now."""
        if not self._states:
            return []
        order = self._states[0]._comm_ctx.post_forward_order
        taken = list(order)
        order.clear()
        for group in taken:
            group._post_forward_indices.clear()
        return taken

    @contextlib.contextmanager
    def backward(self, forward: list[Any]) -> Iterator[None]:
        """Within this context the backward of a micro-batch runs.

        If it fails, gradients that FSDP2 has not reduced are lost, and what was gathered for it is freed.

        Args:
            forward: The groups that `take_forward` has returned after its forward.
        """
        if not self._states:
            yield
            return
        state = self._states[0]  # what is noted is the same object in all
        running = [each for each in (*self._states, *self._groups) if each._training_state == TrainingState.FORWARD]
        root = state._state_ctx.iter_forward_root
        state._comm_ctx.post_forward_order[:] = forward
        for index, group in enumerate(forward):
            group._post_forward_indices.append(index)
        try:
            yield
        except BaseException:
            forget_unfinished(self._module)  # what FSDP2 does at the end of a backward does not come
            raise
        finally:
            for each in running:
                each._training_state = TrainingState.FORWARD
            # Otherwise each layer would take itself for the root, and gather weights after all computation before it.
            state._state_ctx.iter_forward_root = root
