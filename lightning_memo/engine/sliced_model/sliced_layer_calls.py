"""Layer calls of the schedule "slice", each of which runs on one slice of the sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from lightning_memo.engine.forward.autocast import ambient_autocast
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.fp8_modules import why_scaled_together
from lightning_memo.engine.layers.call_attention import CallAttention
from lightning_memo.engine.layers.call_meter import CallMeter, CallPosition
from lightning_memo.engine.layers.call_storage import CallStorage, StoragePolicy
from lightning_memo.engine.layers.hidden_states import WholeStates
from lightning_memo.engine.layers.layer_run import LayerRun
from lightning_memo.engine.modules.layer_probe import LayerTraits
from lightning_memo.engine.saved_tensors.call_arguments import ParkedCallArguments
from lightning_memo.engine.sliced_model.sequence_run import SequenceRun
from lightning_memo.engine.sliced_model.sequence_services import SequenceServices
from lightning_memo.engine.slices.slice_schedules import run_last_layer, run_layer_schedule
from lightning_memo.engine.state.forward_context import ForwardContext
from lightning_memo.engine.state.forward_state import ForwardState
from lightning_memo.engine.state.mutated_buffers import BufferVersions, MutatedBuffers
from lightning_memo.engine.state.other_generators import OtherGenerators
from lightning_memo.parallel.batches.loss_arguments import takes_loss_arguments, why_loss_unfit
from lightning_memo.parallel.batches.positions import why_positions_unknown
from lightning_memo.parallel.batches.token_layout import TokenLayout
from lightning_memo.planner.token_slices import TokenRange
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face


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
        if (why := traits.why_whole or traits.why_nest) and call.tokens > 1:
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
    generators = OtherGenerators(()) if state is None else OtherGenerators.of(call.layer, state)
    return LayerRun(
        engine, slices, meter, ParkedCallArguments(call, x, sequence.arguments),
        CallStorage(engine.offload_groups, policy, meter, call.layer), WholeStates(call, x, slices),
        CallAttention(engine, attended, streamed=True, cores=sequence.cores(call.layer)),
        sequence.handed(call.layer),
        ForwardContext(
            sequence.capture_rng(x.device), generators, MutatedBuffers(call.layer, ()), state,
            ambient_autocast(x.device.type), BufferVersions(call.layer),
        ),
        LayerTraits("", chooses=engine.layer_classes.chooses),
    )  # fmt: skip
