"""A forward of the schedule "slice": its state, what it uses of the engine, and its layer calls on one slice each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lightning_memo.artifacts.plan import SwapPlan
from lightning_memo.engine.forward.autocast import ambient_autocast
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.fp8_modules import why_scaled_together
from lightning_memo.engine.layers.call_attention import CallAttention, Core
from lightning_memo.engine.layers.call_meter import CallMeter, CallPosition
from lightning_memo.engine.layers.call_storage import CallStorage, StoragePolicy
from lightning_memo.engine.layers.engine_services import EngineServices
from lightning_memo.engine.layers.hidden_states import WholeStates
from lightning_memo.engine.layers.layer_run import LayerRun
from lightning_memo.engine.layers.token_sharing import SequenceCutter
from lightning_memo.engine.loaded_plan import PlanLimits
from lightning_memo.engine.memory.slot_memory import SlotMemory
from lightning_memo.engine.modules.layer_classes import LayerClasses, RequestedSettings
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.modules.slice_comparison import SliceComparison
from lightning_memo.engine.recurrence import RecurrentStates
from lightning_memo.engine.saved_tensors.call_arguments import ParkedCallArguments
from lightning_memo.engine.saved_tensors.offloaded_arguments import SliceArguments
from lightning_memo.engine.slices.slice_schedules import SliceOutput, run_last_layer, run_layer_schedule
from lightning_memo.engine.state.forward_state import BufferVersions, ForwardContext, ForwardState
from lightning_memo.engine.state.random_states import OtherGenerators
from lightning_memo.kernels import RngState
from lightning_memo.parallel.batches.loss_arguments import takes_loss_arguments, why_loss_unfit
from lightning_memo.parallel.batches.token_layout import TokenLayout, why_positions_unknown
from lightning_memo.planner.token_slices import SavedBytes, TokenRange
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face


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

    def handed(self, layer: nn.Module) -> RecurrentStates:
        """Return the states of a layer's recurrences, which all slices share."""
        return self._handed.setdefault(layer, RecurrentStates())


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


def find_causal_lm(model: nn.Module) -> nn.Module:
    """Return the causal language model that the schedule "slice" runs slice by slice.

    Raises:
        ValueError: `model` contains none, or it cannot run slice by slice.
    """
    found = next(iter(find_hugging_face(model)), None)
    if found is None:
        raise ValueError(
            'schedule="slice" runs a causal language model of transformers slice by slice, but '
            f'{class_name(model)} has none: use schedule="layer"'
        )
    if not takes_loss_arguments(found):
        why = f"the forward of {class_name(found)} takes neither shift_labels nor num_items_in_batch"
        raise ValueError(
            'schedule="slice" shifts labels and counts tokens once for all slices, but '
            f'{why_loss_unfit(found) or why}: use schedule="layer"'
        )
    if why := why_positions_unknown(found):
        raise ValueError(
            f'schedule="slice" runs the model slice after slice, but {class_name(found)} {why}, and would count the '
            'tokens of each slice from 0: use schedule="layer"'
        )
    if why := why_scaled_together(found):
        raise ValueError(f'schedule="slice" runs the model slice after slice, but {why}: use schedule="layer"')
    return found


@contextlib.contextmanager
def slice_by_slice(engine: SequenceServices, layout: TokenLayout, batch: int) -> Iterator[SequenceRun]:
    """Make the engine's layers run on one slice of the sequence after the other inside the context.

    Args:
        engine: Runs the layers.
        layout: The layout of the sequence.
        batch: Number of sequences.

    Raises:
        ValueError: An earlier forward waits for its backward.
    """
    if engine.calls.interrupted:
        engine.reset()
    if engine.calls:
        raise ValueError(
            'schedule="slice" takes one forward of the model before its backward, and there is another: run the '
            'backward first, or use schedule="layer"'
        )
    planned = None if engine.profiles(batch, layout.tokens) else engine.swap
    if planned is None:
        slices = engine.cutter.recomputed(layout.tokens, engine.settings.slice_tokens)
    else:
        slices = engine.cutter.slices(planned.storage, layout.tokens)
    engine.sequence = SequenceRun(slices)
    current = engine.sharing.current_layout
    current.layout = layout
    try:
        yield engine.sequence
    finally:
        engine.sequence = None
        current.clear()


def run_slice(engine: SequenceServices, sequence: SequenceRun, call: LayerCall, x: Tensor, key: int) -> Any:
    """Run a layer call on one slice of the sequence.

    Args:
        engine: Runs the layers.
        sequence: The forward that the call belongs to.
        call: The layer and its arguments.
        x: The layer's input for the slice.
        key: Number of layer calls that came before, those for earlier slices included.

    Raises:
        ValueError: The layer cannot run slice after slice.
    """
    layer = key % len(engine.layers)
    position = CallPosition(layer, key, sequence.index)
    if sequence.index == 0:  # the last slice may have a single token, too few for a probe
        traits = engine.sharing.agreed(engine.layer_classes.of(call, x), x.device)
        if (why := traits.unsliceable or traits.needs_full_attention) and call.tokens > 1:
            raise engine.settings.backing_error(why)
        due = engine.comparison.due(key, len(engine.layers))
        if call.tokens > 1:
            engine.comparison.ends_slices(call, x, traits, [call.tokens, sequence.tokens], due, needs_slices=True)
    engine.mark(key, "forward_begin", position.subject)
    assert engine.memory is not None
    sequence.enter(call, engine.memory)
    if engine.profile is not None and sequence.index == 0:
        engine.parked = sequence.arguments.saved
        engine.profile.handed(layer, traits.saved)
    run = _run_of_slice(engine, sequence, call, x, position)
    engine.limits.begin_call(key, parts=len(sequence.slices))
    engine.calls.add(key, run)
    if call.layer is not engine.layers[-1]:
        return run_layer_schedule(run, x)
    y, sequence.output = run_last_layer(run, x)
    return y


def _run_of_slice(
    engine: SequenceServices, sequence: SequenceRun, call: LayerCall, x: Tensor, position: CallPosition
) -> LayerRun:
    """Return the run of a layer call that shares arguments, attention and random state with others of the sequence."""
    slices = (TokenRange(0, call.tokens, sequence.slice.places),)
    meter = CallMeter(engine, position, slices=1)
    compresses = engine.swap is not None and engine.swap.precision == "fp8"
    policy = StoragePolicy(engine.memory, swap=True, per_slice=True, compresses=compresses)
    attended = [part.gathered(call.shards) for part in sequence.slices]
    state = ForwardState(call.layer, ()) if sequence.slice.recomputes else None
    generators = OtherGenerators(()) if state is None else OtherGenerators.of(state)
    return LayerRun(
        engine, slices, meter, ParkedCallArguments(call, x, sequence.arguments),
        CallStorage(engine.offload_groups, policy, meter, call.layer), WholeStates(call, x, slices),
        CallAttention(engine, attended, streamed=True, cores=sequence.cores(call.layer)),
        sequence.handed(call.layer),
        ForwardContext(
            sequence.capture_rng(x.device), generators, state, ambient_autocast(x.device.type),
            BufferVersions(call.layer),
        ),
        LayerTraits("", routes=engine.layer_classes.routes),
    )  # fmt: skip
