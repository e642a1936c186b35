"""What a step that is run again begins with: the states of the generators of random numbers."""

from __future__ import annotations

import torch
from torch import nn

from lightning_memo.engine.forward.python_state import PythonState
from lightning_memo.engine.saved_tensors.other_generators import OtherGenerators
from lightning_memo.kernels.rng_state import RngState


class StepState:
    """The state from before the forward of a batch, to which the process can return.

    Tensors are kept in the memory of those of the first batch: planned buffers do not outlive a step.

    Args:
        model: The model that is trained.
        device: Where it runs.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._rng = RngState.capture(device)
        # Those of modules are looked for once, which takes as long as 20 later notes.
        self._generators = OtherGenerators.of(model, PythonState(model, ()))

    def note(self) -> None:
        """Take the present state in place of the earlier one."""
        present = RngState.capture(self._rng.device)
        self._rng.cpu.copy_(present.cpu)
        if self._rng.accelerator is not None and present.accelerator is not None:
            self._rng.accelerator.copy_(present.accelerator)
        self._generators.note()

    def restore(self) -> None:
        """Make this state the present one."""
        self._rng.restore()
        self._generators.restore()
