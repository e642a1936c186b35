"""A call of a layer, from its forward to the end of its backward: its slices, hidden states and attention."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from lightning_memo.engine.attention.sliced_attention import SlicedAttention, StreamedAttention, StreamedUlysses
from lightning_memo.engine.forward.autocast import ambient_autocast
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.fp8_state import ForwardFp8
from lightning_memo.engine.layers.call_meter import CallMeter, CallPosition, EngineServices
from lightning_memo.engine.layers.call_storage import CallStorage, StoragePolicy
from lightning_memo.engine.memory.offloaded_tensor import TensorBuilder, read_parts
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.recurrence import RecurrentStates, RunningDocuments
from lightning_memo.engine.saved_tensors.call_arguments import CallArguments, ParkedCallArguments, SliceArguments
from lightning_memo.engine.state.forward_state import BufferVersions, ForwardContext, ForwardState
from lightning_memo.engine.state.held_state import HeldState
from lightning_memo.engine.state.random_states import OtherGenerators
from lightning_memo.kernels import AttentionSpec, RngState
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.planner.token_slices import TokenRange
from lightning_memo.utils.retained_graph import (
    NOT_RETAINED,
    graph_is_retained,
    refuse_second_derivatives,
)


class WholeStates:
    """Hidden states of a layer that runs on all its tokens at once.

    Args:
        call: The layer and its arguments.
        x: The layer's input, `[batch, tokens, hidden]`.
        slices: The slices in which the layer runs.

    Attributes:
        device: Where the layer runs.
        x_requires_grad: Whether the layer's input needs a gradient.
    """

    def __init__(self, call: LayerCall, x: Tensor, slices: Sequence[TokenRange]) -> None:
        self.device, self.x_requires_grad = x.device, x.requires_grad
        self._dim = call.token_dim
        self._bounds = [(part.start, part.stop) for part in slices]
        self._y: TensorBuilder | Tensor | None = None
        self._dx: TensorBuilder | Tensor | None = None
        self._dy: Iterator[Tensor] | None = None

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Return the input of each slice, without history."""
        return read_parts(x, self._dim, self._bounds)

    def write_output(self, part: TokenRange, y: Tensor) -> None:
        """Take a slice's part of the layer's output."""
        self._y = y.detach()

    def take_output(self) -> Tensor:
        """Return the layer's output, and hold it no longer."""
        y, self._y = self._y, None
        assert y is not None
        return y.take() if isinstance(y, TensorBuilder) else y

    def begin_output_gradient(self, dy: Tensor) -> None:
        """Take the gradient of the layer's output; slices read their parts, last slice first."""
        self._dy = read_parts(dy, self._dim, self._bounds[::-1])

    def next_output_gradient(self) -> Tensor | None:
        """Return the part of the output's gradient of the slice whose turn it is; `None` if the output has none."""
        if self._dy is None:
            return None
        for dy in self._dy:
            self._forget_gradient()
            return dy
        raise AssertionError("every slice has taken its part of the output's gradient")

    def _forget_gradient(self) -> None:
        self._dy = iter(())  # it need not live longer than the slice needs it

    def drop_output_gradient(self) -> None:
        """Hold the gradient of the output no longer."""
        self._dy = None

    def drop_gradients(self) -> None:
        """Hold no gradients, of which the input's may be incomplete."""
        self._dy = self._dx = None

    def write_input_gradient(self, part: TokenRange, dx: Tensor) -> None:
        """Take a slice's part of the gradient of the layer's input."""
        self._dx = dx

    def take_input_gradient(self) -> Tensor | None:
        """Return the gradient of the layer's input, and hold it no longer; `None` if there is none."""
        dx, self._dx = self._dx, None
        return dx.take() if isinstance(dx, TensorBuilder) else dx


class SlicedStates(WholeStates):
    """Hidden states of a layer that runs slice after slice.

    Args:
        call: The layer and its arguments.
        x: The layer's input, `[batch, tokens, hidden]`.
        slices: The slices in which the layer runs.
        memory: The host memory for the output and the gradient of the input; `None` if they are on the device.
    """

    def __init__(self, call: LayerCall, x: Tensor, slices: Sequence[TokenRange], memory: SlotMemory | None) -> None:
        super().__init__(call, x, slices)
        self._tokens, self._memory = call.tokens, memory
        self._rows_at_once = slices[0].tokens * call.batch

    def write_output(self, part: TokenRange, y: Tensor) -> None:
        self._y = self._written(self._y, part, y)

    def _forget_gradient(self) -> None:
        """Later slices need their parts."""

    def write_input_gradient(self, part: TokenRange, dx: Tensor) -> None:
        self._dx = self._written(self._dx, part, dx)

    def _written(self, into: TensorBuilder | Tensor | None, part: TokenRange, t: Tensor) -> TensorBuilder:
        if not isinstance(into, TensorBuilder):
            shape = list(t.shape)
            shape[self._dim] = self._tokens
            into = TensorBuilder(shape, t.dtype, t.device, self._rows_at_once, self._memory)
        into.write(self._dim, part.start, local_part(t))
        return into


Core = SlicedAttention | StreamedAttention | StreamedUlysses


class CallAttention:
    """Attention cores of a layer, which the slices of a sequence share.

    Args:
        engine: Provides kernels.
        slices: The slices of the sequence as attention sees them.
        streamed: Whether keys and values of earlier slices come from the host.
        cores: The cores that earlier slices have made.

    Attributes:
        slices: The slices of the sequence as attention sees them.
        cores: The cores, in the order of the layer's attention calls.
    """

    def __init__(
        self,
        engine: EngineServices,
        slices: Sequence[TokenRange],
        streamed: bool,
        cores: list[Core],
    ) -> None:
        self._engine, self._streamed = engine, streamed
        self.slices = tuple(slices)
        self.cores = cores

    def core(self, number: int, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Core:
        """Return the core of the attention call `number`; all slices make their calls in the same order."""
        if number == len(self.cores):
            if self._streamed:
                self.cores.append(self._engine.streamed_attention(self.slices))
            else:
                self.cores.append(SlicedAttention(self._engine.attention.backend(q, k, v, spec), self.slices))
        return self.cores[number]

    def end_forward(self) -> None:
        """No slice runs before the backward."""
        for core in self.cores:
            if isinstance(core, SlicedAttention):
                core.end_forward()

    def rewind(self) -> None:
        """End a backward that another one may follow."""
        for core in self.cores:
            core.rewind()

    def release(self) -> None:
        """Give back the memory that the cores hold."""
        while self.cores:
            self.cores.pop().release()


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
        self.joint_attention = bool(traits.needs_full_attention)
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
        """Whether recurrences get a state from elsewhere, or give it to others, or begin anew in each document."""
        return self.in_slices or self.handed.exchange is not None or self.call.documents is not None

    def documents_of(self, number: int) -> RunningDocuments | None:
        """Return the documents of the rows for a slice of the sequence; `None` if rows are not packed."""
        return RunningDocuments.of(self.call.documents, self.call.layout, self.attention.slices[number].start)

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
                "alpha=0"
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
                "its calls alike in all steps, or set alpha=0"
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


@dataclass(slots=True)
class SliceOutput:
    """The output of a model's layers for one slice of the sequence.

    Attributes:
        run: The call of the last layer.
        token: The scalar at which the backward of the slice's layers begins, `[]`.
        hidden: The last layer's output, without history.
    """

    run: LayerRun
    token: Tensor
    hidden: Tensor


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
        self._handed: dict[nn.Module, RecurrentStates] = {}

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
            raise ValueError(
                f'{call.name} runs twice in a forward, or after the last layer: use stream_from_host="hidden"'
            )
        self._called.add(call.layer)
        self.arguments.add((call.args, call.kwargs))

    def capture_rng(self, device: torch.device) -> RngState:
        """Capture the random state; slices and layers between which nothing is drawn share one copy."""
        self._rng_state = RngState.capture(device, self._rng_state)
        return self._rng_state

    def cores(self, layer: nn.Module) -> list[Core]:
        """Return the cores of a layer's attention calls, which all slices share."""
        return self._cores.setdefault(layer, [])

    def handed(self, layer: nn.Module) -> RecurrentStates:
        """Return the states of a layer's recurrences, which all slices share."""
        return self._handed.setdefault(layer, RecurrentStates())


def run_of_call(
    engine: EngineServices,
    call: LayerCall,
    x: Tensor,
    position: CallPosition,
    slices: Sequence[TokenRange],
    policy: StoragePolicy,
    traits: LayerTraits,
    *,
    sequence: SequenceRun | None = None,
    measured: bool = True,
) -> LayerRun:
    """Return the run of a layer call.

    Args:
        engine: Provides kernels, and receives reports.
        call: The layer and its arguments.
        x: The layer's input.
        position: The place of the call in the step.
        slices: Token ranges that cover `x`.
        policy: How the plan stores what the layer saves.
        traits: The traits of the layer.
        sequence: If the model runs slice by slice, what the call shares with others; `x` is then one slice.
        measured: Whether the call is reported to whoever measures.
    """
    meter = CallMeter(engine, position, len(slices), measured)
    states = WholeStates(call, x, slices)
    if len(slices) > 1:
        on_host = policy.memory if policy.states_on_host else None
        states = SlicedStates(call, x, slices, on_host)
    if sequence is None:
        arguments, handed = CallArguments(call, x), engine.sharing.handed_states(call.layout)
        of_sequence, cores = slices, list[Core]()
    else:
        arguments, handed = ParkedCallArguments(call, x, sequence.arguments), sequence.handed(call.layer)
        of_sequence, cores = sequence.slices, sequence.cores(call.layer)
    attended = [part.gathered(call.shards) for part in of_sequence]
    return LayerRun(
        engine, slices, meter, arguments, CallStorage(engine.offload_groups, policy, meter), states,
        CallAttention(engine, attended, policy.per_slice, cores), handed,
        _forward_context(call, x, slices, traits, sequence), traits,
    )  # fmt: skip


def _forward_context(
    call: LayerCall, x: Tensor, slices: Sequence[TokenRange], traits: LayerTraits, sequence: SequenceRun | None
) -> ForwardContext:
    recomputes, in_slices = any(part.recomputes for part in slices), len(slices) > 1
    # Those that slices of a sequence share wait on the host.
    arguments = (call.args, call.kwargs) if sequence is None else ()
    state, generators = None, OtherGenerators(())
    if recomputes:
        changing = {id(call.layer.get_buffer(name)) for name in traits.changing}
        state = ForwardState(call.layer, arguments, changing, rewritten=bool(traits.unsliceable))
    if recomputes or in_slices:  # otherwise, the layer draws once
        generators = OtherGenerators.of(state or HeldState(call.layer, arguments))
    rng = RngState.capture(x.device) if sequence is None else sequence.capture_rng(x.device)
    versions = BufferVersions(call.layer) if in_slices or sequence is not None else None
    fp8 = ForwardFp8.of(call.layer) if recomputes and sequence is None else None
    return ForwardContext(rng, generators, state, ambient_autocast(x.device.type), versions, fp8)
