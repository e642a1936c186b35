"""The state of a forward of the whole model that runs slice by slice."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.layers.call_attention import Core
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.recurrence import HandedStates
from lightning_memo.engine.saved_tensors.parked_arguments import SliceArguments
from lightning_memo.engine.slices.slice_schedules import SliceOutput
from lightning_memo.kernels import RngState
from lightning_memo.planner.token_slices import TokenRange


class SequenceRun:
    """A forward of the model slice by slice: the slice that runs, and what its layers share with earlier slices.

    Args:
        slices: Token ranges that cover the sequence.

    Attributes:
        index: Number of the slice that runs.
        output: The output of the layers for the slice that runs, once the last layer has run.
        all_arguments: The arguments that the layer calls of each slice share.
    """

    def __init__(self, slices: Sequence[TokenRange]) -> None:
        self.slices = tuple(slices)
        self.index = 0
        self.output: SliceOutput | None = None
        self.all_arguments: list[SliceArguments] = []
        self._rng_state: RngState | None = None
        self._called: set[nn.Module] = set()
        self._cores: dict[nn.Module, list[Core]] = {}
        self._handed: dict[nn.Module, HandedStates] = {}

    @property
    def tokens(self) -> int:
        """Number of tokens in the sequence."""
        return self.slices[-1].stop

    @property
    def slice(self) -> TokenRange:
        """The slice that runs."""
        return self.slices[self.index]

    @property
    def arguments(self) -> SliceArguments:
        """The arguments that the layer calls of the running slice share."""
        return self.all_arguments[self.index]

    def enter(self, call: LayerCall, memory: SlotMemory) -> None:
        """Note that a layer is called on the slice that runs.

        Args:
            call: The layer and its arguments.
            memory: The host memory for the arguments.

        Raises:
            ValueError: The layer was called on this slice before, or the last layer has run.
        """
        if len(self.all_arguments) == self.index:
            self.all_arguments.append(SliceArguments(memory, self.slice))
            self._called.clear()
        if call.layer in self._called or self.output is not None:
            raise ValueError(f'{call.name} runs twice in a forward, or after the last layer: use schedule="layer"')
        self._called.add(call.layer)
        self.arguments.add((call.args, call.kwargs))

    def capture_rng(self, device: torch.device) -> RngState:
        """Capture the random state; slices and layers between which nothing is drawn share one copy."""
        self._rng_state = RngState.capture(device, self._rng_state)
        return self._rng_state

    def cores(self, layer: nn.Module) -> list[Core]:
        """Return the cores of a layer's attention calls, which all slices share."""
        return self._cores.setdefault(layer, [])

    def handed(self, layer: nn.Module) -> HandedStates:
        """Return the states of a layer's recurrences, which all slices share."""
        return self._handed.setdefault(layer, HandedStates())
