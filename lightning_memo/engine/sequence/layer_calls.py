"""Layer calls of the schedule "slice": each gets one slice of the sequence."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lightning_memo.engine.copies.step_recorder import Subject
from lightning_memo.engine.forward.intercept import set_layout
from lightning_memo.engine.layers.layer_run import LayerCall, LayerRun
from lightning_memo.engine.layers.slice_schedules import run_last_layer, run_layer_schedule
from lightning_memo.engine.modules.low_precision_scales import why_scaled_together
from lightning_memo.engine.sequence.sliced_model import SequenceRun
from lightning_memo.parallel.batches.divide_batch import takes_loss_arguments
from lightning_memo.parallel.batches.token_layout import TokenLayout
from lightning_memo.planner.token_slices import TokenRange
from lightning_memo.utils.find_layers import find_hugging_face

if TYPE_CHECKING:
    from lightning_memo.engine.engine import Engine


def find_causal_lm(model: nn.Module) -> nn.Module:
    """What the schedule "slice" cuts.

    Raises:
        ValueError: The model holds none.
    """
    found = next(iter(find_hugging_face(model)), None)
    if found is None:
        raise ValueError(
            'schedule="slice" runs a causal language model of transformers slice by slice, and '
            f'{type(model).__name__} has none: use schedule="layer"'
        )
    if not takes_loss_arguments(found):
        raise ValueError(
            f'schedule="slice" shifts labels and counts tokens once for all slices, and the forward of '
            f'{type(found).__name__} takes neither shift_labels nor num_items_in_batch: use schedule="layer"'
        )
    if why := why_scaled_together(found):
        raise ValueError(f'schedule="slice" runs the model slice after slice, but {why}: use schedule="layer"')
    return found


@contextlib.contextmanager
def slice_by_slice(engine: Engine, layout: TokenLayout, batch: int) -> Iterator[SequenceRun]:
    """Inside, the engine's layers get one slice of the sequence after the other.

    Args:
        engine: Runs the layers.
        layout: The sequence.
        batch: Sequences.

    Raises:
        ValueError: An earlier forward waits for its backward.
    """
    engine.reset_if_interrupted()
    if engine.calls_alive:
        raise ValueError(
            'schedule="slice" takes one forward of the model before its backward, and there is another: run the '
            'backward first, or use schedule="layer"'
        )
    planned = None if engine.profiles(batch, layout.tokens) else engine.swap
    alpha, longest = (0.0, engine.wishes.slice_tokens) if planned is None else (planned.alpha, planned.slice_tokens)
    engine.sequence = SequenceRun(engine, engine.cut(layout.tokens, alpha, longest), batch)
    set_layout(layout)
    try:
        yield engine.sequence
    finally:
        engine.sequence = None
        set_layout(None)


def run_slice(engine: Engine, sequence: SequenceRun, call: LayerCall, x: Tensor, alive: int) -> Any:
    """A layer call on one slice of the sequence; `alive` calls came before."""
    index = alive % len(engine.layers)
    engine.mark(alive, "forward_begin", Subject(index, sequence.index))
    if sequence.index == 0:  # the last slice may have a single token, which says nothing
        traits = engine.kinds.of(call, x)
        if traits.why_whole and call.tokens > 1:
            raise ValueError(
                f'schedule="slice" runs layers slice after slice, but {traits.why_whole}: use schedule="layer"'
            )
    assert engine.memory is not None
    sequence.enter(call, engine.memory)
    if engine.profile is not None and sequence.index == 0:
        engine.shared = sequence.arguments.saved
    part = TokenRange(0, call.tokens, sequence.slice.action)
    run = LayerRun(
        engine, call, x, index, (part,), engine.memory, swap=True, streamed=True, sequence=sequence, key=alive
    )
    engine.begin(run, calls=len(sequence.slices))
    if call.layer is not engine.layers[-1]:
        return run_layer_schedule(run, x)
    y, sequence.output = run_last_layer(run, x)
    return y
