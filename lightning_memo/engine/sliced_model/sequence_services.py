"""The part of the engine that the schedule "slice" uses, as a Protocol."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn

from lightning_memo.artifacts.swap_plan import SwapPlan
from lightning_memo.engine.layers.engine_services import EngineServices
from lightning_memo.engine.layers.token_sharing import SequenceCutter
from lightning_memo.engine.loaded_plan import PlanLimits
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.modules.layer_classes import LayerClasses
from lightning_memo.engine.modules.requested_settings import RequestedSettings
from lightning_memo.engine.modules.slice_comparison import SliceComparison
from lightning_memo.engine.sliced_model.sequence_run import SequenceRun
from lightning_memo.planner.token_slices import SavedBytes


class SequenceServices(EngineServices, Protocol):
    """The part of the engine that a forward of the model slice by slice sees.

    Attributes:
        layers: The model's layers, in order.
        device: Where the layers run.
        settings: The settings that were requested.
        cutter: Cuts sequences into slices.
        layer_classes: Probes layers.
        comparison: Compares layers in slices with whole layers.
        limits: The batches that the plan covers.
        swap: The plan; `None` before the first step.
        memory: The memory of the plan.
        sequence: The forward that runs slice by slice; `None` if there is none.
        parked: Sizes of the arguments of the first slice that wait on the host.
    """

    layers: list[nn.Module]
    device: torch.device
    settings: RequestedSettings
    cutter: SequenceCutter
    layer_classes: LayerClasses
    comparison: SliceComparison
    limits: PlanLimits
    swap: SwapPlan | None
    memory: SlotMemory | None
    sequence: SequenceRun | None
    parked: list[SavedBytes]

    def profiles(self, batch: int, tokens: int) -> bool:
        """Return whether a step with such a batch is going to be profiled."""

    def reset(self) -> None:
        """Give back what an interrupted step still holds."""
