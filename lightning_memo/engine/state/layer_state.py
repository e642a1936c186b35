"""What a run of a layer may change, and what undoes it."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.fp8_modules.module_scales import Fp8State
from lightning_memo.engine.state.mutated_buffers import MutatedBuffers
from lightning_memo.engine.state.other_generators import OtherGenerators
from lightning_memo.engine.state.python_state import PythonState
from lightning_memo.engine.state.tensor_attributes import TensorAttributes, why_not_written
from lightning_memo.kernels import RngState


class LayerState:
    """The random state, the buffers, attributes and arguments of a layer, and its FP8 state.

    Args:
        call: The layer and its arguments.
        device: Where the layer runs.

    Attributes:
        rng: The random state.
        buffers: The buffers.
        python: The attributes and the containers among the arguments.
        tensors: The small tensors among the attributes.
    """

    def __init__(self, call: LayerCall, device: torch.device) -> None:
        self.rng, self.buffers = RngState.capture(device), MutatedBuffers(call.layer)
        self.python = PythonState(call.layer, (call.args, call.kwargs), named=True)
        self.tensors = TensorAttributes(self.python, self.buffers.ids)
        self._fp8 = Fp8State(call.layer)
        self._call, self._generators = call, OtherGenerators.of(call.layer, self.python)

    def why_not_written(self, t: Tensor) -> str:
        """Return why the layer must not write into a tensor that was there before; empty if it can be undone."""
        call = self._call
        return why_not_written(call.layer, call.name, (call.args, call.kwargs), self.python, t)

    def first_written(self) -> str:
        """Return the name of something that the layer has written; empty if there is nothing."""
        buffers = (f"its buffer {name}" for name in self.buffers.changed())
        return self.python.first_written() or next(buffers, self.tensors.changed())

    def restore(self) -> None:
        """Undo what has changed."""
        self.buffers.restore(self.buffers.changed())
        self.python.restore()
        self.tensors.restore()
        self._fp8.restore()
        self.restore_random()

    def restore_random(self) -> None:
        """Let the layer draw the same random numbers again."""
        self.rng.restore()
        self._generators.restore()
