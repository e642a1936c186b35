"""The part of the engine that layer calls use, as a Protocol."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from lightning_memo.engine.attention.attention_selector import AttentionSelector
from lightning_memo.engine.attention.sliced_attention import StreamedAttention, StreamedUlysses
from lightning_memo.engine.layers.pending_calls import PendingCalls
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.layers.token_sharing import TokenSharing
from lightning_memo.engine.modules.slice_comparison import SliceComparison
from lightning_memo.engine.saved_tensors.offload_group import OffloadGroups
from lightning_memo.engine.timeline_recorder import Subject, TimelineRecorder
from lightning_memo.planner.token_slices import TokenRange


class EngineServices(Protocol):
    """The part of the engine that calls of layers see.

    Attributes:
        attention: Chooses attention kernels.
        recorder: Records when computations begin and end.
        offload_groups: Opens offload groups, and brings them back in the backward.
        calls: The layer calls whose backward has not ended.
        sharing: How the tokens of a batch are divided over processes.
        comparison: Provides sums by which recomputed values are compared with the forward's.
        profile: The profile of the running step; `None` if the step is not profiled.
        before_layer: Called before each forward and backward of a layer; may raise to end the step.
    """

    attention: AttentionSelector
    recorder: TimelineRecorder
    offload_groups: OffloadGroups
    calls: PendingCalls
    sharing: TokenSharing
    comparison: SliceComparison
    profile: StepProfile | None
    before_layer: Callable[[], None] | None

    def mark(self, key: int, name: str, subject: Subject) -> None:
        """Report that a layer call begins or ends something."""

    def streamed_attention(self, slices: Sequence[TokenRange]) -> StreamedAttention | StreamedUlysses:
        """Return the attention core of a layer whose earlier keys and values come from the host."""
