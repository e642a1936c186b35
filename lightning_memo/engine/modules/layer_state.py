"""What a run of a layer may change, and what undoes it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.forward.python_state import PythonState
from lightning_memo.engine.memory.saved_storages import version_of
from lightning_memo.engine.saved_tensors.mutated_buffers import MutatedBuffers
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
    """

    def __init__(self, call: LayerCall, device: torch.device) -> None:
        self.rng, self.buffers = RngState.capture(device), MutatedBuffers(call.layer)
        self.python = PythonState(call.layer, (call.args, call.kwargs))
        self._name = call.name
        self._versions = [(t, version_of(t)) for t in tree_leaves((call.args, call.kwargs)) if isinstance(t, Tensor)]
        own = [value for m in call.layer.modules() for value in vars(m).values() if isinstance(value, torch.Generator)]
        self._own = [(generator, generator.get_state()) for generator in own]
        self._other: tuple[Any, Any] = random.getstate(), np.random.get_state(legacy=False)

    def refuse_unrepeatable(self) -> None:
        """Refuse a layer that has changed what a recomputation could not restore.

        Raises:
            ValueError: It drew random numbers of other generators than torch's, or wrote into a tensor it was given.
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
                f"{self._name} draws random numbers from {generator}, which a recomputation cannot repeat: draw them "
                "with torch's functions and without a generator, for example torch.rand(())"
            )
        if any(version_of(t) != version for t, version in self._versions):
            raise ValueError(
                f"{self._name} writes into a tensor that it gets as an argument, and a recomputation would write "
                "again: write into a copy, and return it"
            )

    def restore(self) -> None:
        """Undo what has changed."""
        self.buffers.restore(self.buffers.changed())
        self.python.restore()
        self.rng.restore()


def _same_state(state: Any, other: Any) -> bool:
    """Return whether two states of numpy's generator are equal."""
    inner, before = state["state"], other["state"]
    return bool(inner["pos"] == before["pos"] and np.array_equal(inner["key"], before["key"]))
