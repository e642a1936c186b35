"""What a run of a layer may change, and what undoes it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.forward.python_state import PythonState
from lightning_memo.engine.saved_tensors.mutated_buffers import MutatedBuffers
from lightning_memo.engine.saved_tensors.tensor_attributes import TensorAttributes, why_not_written
from lightning_memo.kernels import RngState


class LayerState:
    """The random state, and the buffers, attributes and arguments of a layer.

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
        self.python = PythonState(call.layer, (call.args, call.kwargs))
        self.tensors = TensorAttributes(self.python, self.buffers.ids)
        self._call = call
        own = [value for m in call.layer.modules() for value in vars(m).values() if isinstance(value, torch.Generator)]
        self._own = [(generator, generator.get_state()) for generator in own]
        self._other: tuple[Any, Any] = random.getstate(), np.random.get_state(legacy=False)

    def refuse_unrepeatable(self) -> None:
        """Refuse a layer that has changed what a recomputation could not restore.

        Raises:
            ValueError: It drew random numbers of other generators than torch's.
        """
        generator = ""
        if random.getstate() != self._other[0]:
            generator = "Python's random"
        elif not _same_state(np.random.get_state(legacy=False), self._other[1]):
            generator = "numpy.random"
        elif any(not torch.equal(own.get_state(), state) for own, state in self._own):
            generator = "a torch.Generator of its own"
        if generator:
            random.setstate(self._other[0])
            np.random.set_state(self._other[1])
            for own, state in self._own:
                own.set_state(state)
            raise ValueError(
                f"{self._call.name} draws random numbers from {generator}, which a recomputation cannot repeat: draw "
                "them with torch's functions and without a generator, for example torch.rand(())"
            )

    def why_not_written(self, t: Tensor) -> str:
        """Return why the layer must not write into a tensor that was there before; empty if it can be undone."""
        call = self._call
        return why_not_written(call.layer, call.name, (call.args, call.kwargs), self.python, t)

    def restore(self) -> None:
        """Undo what has changed."""
        self.buffers.restore(self.buffers.changed())
        self.python.restore()
        self.tensors.restore()
        self.rng.restore()


def _same_state(state: Any, other: Any) -> bool:
    """Return whether two states of numpy's generator are equal."""
    inner, before = state["state"], other["state"]
    return bool(inner["pos"] == before["pos"] and np.array_equal(inner["key"], before["key"]))
