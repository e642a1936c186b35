"""A call of a layer, from its forward to the end of its backward."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.autograd import Variable

from lightning_memo.engine.forward.autocast import ambient_autocast
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.fp8_state import ForwardFp8
from lightning_memo.engine.layers.call_attention import CallAttention
from lightning_memo.engine.layers.call_meter import CallMeter, CallPosition
from lightning_memo.engine.layers.call_storage import CallStorage, StoragePolicy
from lightning_memo.engine.layers.engine_services import EngineServices
from lightning_memo.engine.layers.hidden_states import SlicedStates, WholeStates
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.recurrence import RecurrentStates
from lightning_memo.engine.saved_tensors.call_arguments import CallArguments
from lightning_memo.engine.state.forward_state import BufferVersions, ForwardContext, ForwardState
from lightning_memo.engine.state.held_state import HeldState
from lightning_memo.engine.state.random_states import OtherGenerators
from lightning_memo.kernels import AttentionSpec, RngState
from lightning_memo.planner.token_slices import TokenRange
from lightning_memo.utils.retained_graph import (
    NOT_RETAINED,
    graph_is_retained,
    refuse_second_derivatives,
)


class PartOfRun(Protocol):
    """A slice of a layer call."""

    def rewind(self) -> None:
        """Drop what a backward has made, so that another one can run."""


class LayerRun:
    """The state of one layer call from its forward to the end of its backward.

    The autograd graph refers to the slices of the call, and they refer to this object. It keeps neither alive, so that
    a graph that is dropped frees the run, and the slot is given back at once.

    Args:
        engine: Provides kernels, and receives reports.
        slices: Token ranges that cover the layer's input.
        meter: Reports what the call does.
        arguments: The layer and its arguments.
        storage: Stores the tensors that the layer saves.
        states: The hidden states.
        attention: The attention cores.
        handed: The states of recurrences, which slices hand on.
        forward_context: What a recomputation has to restore.
        traits: The traits of the layer.

    Attributes:
        parts: The slices that run.
    """

    def __init__(
        self,
        engine: EngineServices,
        slices: Sequence[TokenRange],
        meter: CallMeter,
        arguments: CallArguments,
        storage: CallStorage,
        states: WholeStates,
        attention: CallAttention,
        handed: RecurrentStates,
        forward_context: ForwardContext,
        traits: LayerTraits,
    ) -> None:
        self.engine = engine
        self.slices = tuple(slices)
        self.meter, self.position = meter, meter.position
        self.arguments, self.storage = arguments, storage
        self.states, self.attention, self.handed = states, attention, handed
        self.forward_context = forward_context
        self.side_places, self.routes = traits.locality.side_places, traits.routes
        self.parts: weakref.WeakSet[PartOfRun] = weakref.WeakSet()
        self._started = self._ended = self._retained = False

    @property
    def call(self) -> LayerCall:
        """The layer and its arguments."""
        return self.arguments.call

    @property
    def key(self) -> int:
        """Position among the layer calls that are alive."""
        return self.position.key

    @property
    def whole(self) -> bool:
        """Whether the layer runs as a single slice."""
        return len(self.slices) == 1

    @property
    def in_slices(self) -> bool:
        """Whether the sequence runs in several slices, of which this call may have only one."""
        return len(self.attention.slices) > 1

    @property
    def hands_states(self) -> bool:
        """Whether recurrences get a state from elsewhere, or their state is needed elsewhere."""
        return self.in_slices or self.handed.exchange is not None

    @property
    def needs_mode(self) -> bool:
        """Whether torch functions are caught: for dropout in slices, and for attention imported by name.

        Layers of transformers call attention through its interface, so a single slice of them needs no mode.
        """
        # FSDP2 and tensor parallelism give a layer a class of their own, derived from the layer's class.
        classes = type(self.call.layer).__mro__
        return not self.whole or not any(c.__module__.startswith("transformers.") for c in classes)

    def check_sliceable(self, spec: AttentionSpec) -> None:
        """Refuse attention that needs tokens that a slice does not have.

        Raises:
            ValueError: The attention has changed since the layer was probed.
        """
        if not self.whole and not spec.sliceable:
            raise ValueError(
                f"{self.call.name} was cut into {len(self.slices)} slices, but its attention is now "
                "not causal, has an explicit mask or draws dropout: keep attention alike in all steps, or set "
                'schedule="nest"'
            )

    def check_whole(self, why: str) -> None:
        """Refuse attention or a recurrence that the layer computes itself, if a slice would see its own tokens only.

        Args:
            why: Why the layer computes it itself.

        Raises:
            ValueError: The layer has changed since it was probed.
        """
        if self.in_slices:
            raise ValueError(
                f"{self.call.name} was cut into {len(self.attention.slices)} slices, but now {why}: keep "
                'its calls alike in all steps, or set storage="alpha" and alpha=0'
            )

    def check_handed(self, why: str) -> None:
        """Refuse a recurrence that takes or returns no state, if other slices or other processes need it.

        Args:
            why: Why it does not.

        Raises:
            ValueError: The layer has changed since it was probed, or other processes have tokens of the sequence.
        """
        self.handed.check(self.call.name, why)
        self.check_whole(why)

    def take_output(self) -> Tensor:
        """End the forward, and return the layer's output."""
        self.end_forward()
        return self.states.take_output()

    def end_forward(self) -> None:
        """Release what only the forward needs on the device.

        Raises:
            ValueError: The layer has begun to write into a buffer, and does so in each slice.
        """
        versions = self.forward_context.versions
        if versions is not None and (name := versions.first_written()):
            raise ValueError(
                f"{self.call.name} writes into its buffer {name}, which it did not in its first forward, and each "
                "slice would do it again: let it write from the first step on, or set alpha=0 or alpha=1 without "
                "slice_tokens"
            )
        self.attention.end_forward()
        self.handed.settle()
        self.storage.end_forward()
        self.arguments.end_forward()
        self.meter.mark("forward_end")

    def begin_output_gradient(self, dy: Tensor) -> None:
        """Begin the backward with the gradient of the layer's output; slices read their parts, last slice first."""
        self.states.begin_output_gradient(dy)
        self.begin_backward()

    def begin_backward(self) -> None:
        """Begin the backward of the layer, or the recomputation of a slice before it.

        Raises:
            RuntimeError: The backward has ended before, or it is to be differentiated itself.
        """
        if self._ended:
            raise RuntimeError(NOT_RETAINED)
        if self._started:
            return
        if self.engine.before_layer is not None:
            self.engine.before_layer()
        self._started, self._retained = True, graph_is_retained()
        self.engine.calls.begin_backward(self)
        refuse_second_derivatives()
        # Callbacks are called only if no exception ends the backward.
        Variable._execution_engine.queue_callback(functools.partial(_note_left, weakref.ref(self)))
        self.meter.mark("backward_begin")
        if self.storage.group is not None:
            self.storage.group.begin_backward()

    def end_backward(self) -> Tensor | None:
        """End the backward, and return the gradient of the layer's input.

        All memory is given back, unless the graph is kept for another backward.
        """
        self.handed.settle()
        if graph_is_retained():
            gradient = self.states.take_input_gradient()
            self.rewind()
            self.engine.calls.remove(self.key, self)
            return gradient
        self.states.drop_output_gradient()
        self._ended = True
        self.engine.calls.leave_backward(self)
        self.arguments.end_backward()
        if self.position.first_slice == 0:
            self.attention.release()
        self.meter.mark("backward_end")
        self.engine.calls.remove(self.key, self)
        if self.storage.group is not None:
            self.storage.group.release()
        return self.states.take_input_gradient()

    def leave_backward(self) -> None:
        """A backward is over that has not ended that of this call, which is not needed for what was asked for."""
        if self._started and not self._ended and self._retained:
            self.rewind()
        self.engine.calls.leave_backward(self)

    def rewind(self) -> None:
        """Drop what a backward has made, and keep what it has read: the graph is kept for another backward."""
        self._started = False
        self.engine.calls.leave_backward(self)
        self.states.drop_gradients()
        self.arguments.end_backward()
        self.attention.rewind()
        self.handed.rewind()
        for part in self.parts:
            part.rewind()
        if self.storage.group is not None:
            self.storage.group.rewind()
        self.meter.mark("backward_end")


def _note_left(run: weakref.ref[LayerRun]) -> None:
    alive = run()
    if alive is not None:
        alive.leave_backward()


def run_of_call(
    engine: EngineServices,
    call: LayerCall,
    x: Tensor,
    position: CallPosition,
    slices: Sequence[TokenRange],
    policy: StoragePolicy,
    traits: LayerTraits,
    *,
    measured: bool = True,
) -> LayerRun:
    """Return the run of a layer call on all tokens of its input.

    Args:
        engine: Provides kernels, and receives reports.
        call: The layer and its arguments.
        x: The layer's input.
        position: The place of the call in the step.
        slices: Token ranges that cover `x`.
        policy: How the plan stores what the layer saves.
        traits: The traits of the layer.
        measured: Whether the call is reported to whoever measures.
    """
    meter = CallMeter(engine, position, len(slices), measured)
    arguments = CallArguments(call, x)
    storage = CallStorage(engine.offload_groups, policy, meter, call.layer)
    states = WholeStates(call, x, slices)
    if len(slices) > 1:
        on_host = policy.memory if policy.states_on_host else None
        states = SlicedStates(call, x, slices, on_host)
    attended = [part.gathered(call.shards) for part in slices]
    return LayerRun(
        engine, slices, meter, arguments, storage, states,
        CallAttention(engine, attended, policy.per_slice), engine.sharing.handed_states(call.layout),
        _forward_context(call, x, slices, traits), traits,
    )  # fmt: skip


def _forward_context(call: LayerCall, x: Tensor, slices: Sequence[TokenRange], traits: LayerTraits) -> ForwardContext:
    recomputes, arguments = any(part.recomputes for part in slices), (call.args, call.kwargs)
    state, generators = None, OtherGenerators(())
    if recomputes:
        changing = {id(call.layer.get_buffer(name)) for name in traits.changing}
        state = ForwardState(call.layer, arguments, changing, rewritten=bool(traits.unsliceable))
    if recomputes or len(slices) > 1:  # otherwise, the layer draws once
        generators = OtherGenerators.of(state or HeldState(call.layer, arguments))
    rng, autocast = RngState.capture(x.device), ambient_autocast(x.device.type)
    versions = BufferVersions(call.layer) if len(slices) > 1 else None
    fp8 = ForwardFp8.of(call.layer) if recomputes else None
    return ForwardContext(rng, generators, state, autocast, versions, fp8)
