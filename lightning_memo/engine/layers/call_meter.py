"""Reports what a layer call does to the profile, the recorder and whoever measures memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from lightning_memo.engine.attention.attention_selector import AttentionSelector
from lightning_memo.engine.attention.sliced_attention import StreamedAttention, StreamedUlysses
from lightning_memo.engine.layers.pending_calls import PendingCalls
from lightning_memo.engine.layers.step_profile import StepProfile
from lightning_memo.engine.layers.token_sharing import TokenSharing
from lightning_memo.engine.modules.slice_comparison import SliceComparison
from lightning_memo.engine.saved_tensors.offload_group import OffloadGroups
from lightning_memo.engine.timeline_recorder import Subject, TimelineRecorder
from lightning_memo.kernels import AttentionSpec
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


@dataclass(frozen=True, slots=True)
class CallPosition:
    """The place of a layer call in a step.

    Attributes:
        layer: Position of the layer in the model.
        key: Position among the layer calls that are alive, those for all slices of a sequence included.
        part: Number of the slice of the sequence that the call is for; `None` if it is for all tokens.
    """

    layer: int
    key: int
    part: int | None = None

    @property
    def first_slice(self) -> int:
        """Number in the sequence of the call's first slice."""
        return self.part or 0

    @property
    def subject(self) -> Subject:
        """The call as the recorder names it."""
        return Subject(self.layer, self.part)


class CallMeter:
    """Reports what one layer call does.

    Args:
        engine: Receives the reports.
        position: The place of the call in the step.
        slices: Number of slices in which the layer runs.
        measured: Whether marks and saved tensors are reported.

    Attributes:
        recorded: Whether the first slice of the sequence, whose saved tensors are profiled, is over.
    """

    def __init__(self, engine: EngineServices, position: CallPosition, slices: int, measured: bool = True) -> None:
        self._engine = engine
        self._slices, self._measured = slices, measured
        self.position = position
        self.recorded = position.first_slice > 0

    @property
    def profile(self) -> StepProfile | None:
        """The profile that records tensors saved now; `None` if they are not profiled."""
        return None if self.recorded or not self._measured else self._engine.profile

    def mark(self, name: str) -> None:
        """Report that the call begins or ends something."""
        if self._measured:
            self._engine.mark(self.position.key, name, self.position.subject)

    def slice_subject(self, number: int) -> Subject:
        """Return a slice of the call as the recorder names it; the call itself if that is its only slice."""
        position = self.position
        return position.subject if self._slices == 1 else Subject(position.layer, position.first_slice + number)

    def computing_slice(self, number: int) -> contextlib.AbstractContextManager[None]:
        """Return a context for the forward of a slice."""
        if self._slices == 1:
            return contextlib.nullcontext()
        return self._engine.recorder.computing("slice", self.slice_subject(number))

    @contextlib.contextmanager
    def computing_attention(self, spec: AttentionSpec) -> Iterator[None]:
        """Record the time of an attention call of the forward, and profile it."""
        with self._engine.recorder.computing("attention"):
            profile, layer = self.profile, self.position.layer
            if profile is None:
                yield
                return
            profile.window(layer, spec.window)
            profile.mark(layer, "attention_begin")
            yield
            profile.mark(layer, "attention_end")

    @contextlib.contextmanager
    def computing_attention_again(self) -> Iterator[None]:
        """Record the time of an attention call of a recomputation, which is no part of what other plans recompute."""
        with self._engine.recorder.computing("attention"):
            profile, layer = self._engine.profile, self.position.layer
            if profile is not None:
                profile.mark(layer, "attention_again_begin")
            yield
            if profile is not None:
                profile.mark(layer, "attention_again_end")
