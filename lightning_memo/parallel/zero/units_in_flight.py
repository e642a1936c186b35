"""FSDP2's units in a pipeline, where backwards of micro-batches run between forwards of others.

Note: [Backwards inside of a forward]
FSDP2 takes the end of a backward for the end of a step. In a pipeline, the model's call goes on, and what it notes of
forwards is put right:

- While ZeRO 3 computes the backward of a layer, FSDP2 gathers the weights of the layer before it, by the order of the
  forwards since the last backward. These would be forwards of later micro-batches, and at the end of a batch there are
  none. The order is taken after each forward, and given back before the backward of the same micro-batch.
- Units around the layers (embedding, head) are in a forward of their own, in which their weights stay gathered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from lightning_memo.parallel.zero.fsdp_units import accumulating, forget_unfinished, fsdp_units, parameter_groups


class UnitsInFlight:
    """The units of FSDP2 of a pipeline stage.

    Args:
        module: The module that is trained, whose weights have been sharded by FSDP2 or not at all.
        zero_stage: ZeRO stage.
    """

    def __init__(self, module: nn.Module, zero_stage: int) -> None:
        self._module, self._zero_stage = module, zero_stage
        # Those inside of others first, as a model may be called without the module around it.
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
            forward: What `take_forward` has returned after its forward.
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
