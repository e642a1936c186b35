"""Layers that run on all tokens of this process at once, without an engine's storage."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_memo.engine.attention.attention_selector import AttentionSelector, WholeAttention
from lightning_memo.engine.forward.intercept import handling
from lightning_memo.engine.forward.layer_call import LayerCall
from lightning_memo.engine.recurrence import HandedStates, StateCall, handing
from lightning_memo.planner.token_slices import KEPT, TokenRange


def run_whole(
    attention: AttentionSelector, handed: HandedStates, call: LayerCall, x: Tensor, forward: Callable[[], Any]
) -> Any:
    """Run a layer, whose attention and recurrences need the tokens of other processes, and return what it returns.

    Args:
        attention: Selects attention kernels.
        handed: The states of its recurrences.
        call: The layer and its arguments.
        x: The layer's input.
        forward: Runs the layer with all its arguments, key-value caches included.
    """
    with handling(WholeAttention(attention, call.layout), call.layer, call.layout):
        if handed.exchange is None:
            return forward()
        numbers = itertools.count()

        def hand(state_call: StateCall) -> Tensor:
            number = next(numbers)
            start = handed.start(number, state_call, first=True)
            return handed.run(number, state_call, start, first=True, last=True)

        with handing(call.layer, hand, functools.partial(handed.check, call.name)):
            output = call.run(x, TokenRange(0, call.tokens, KEPT))  # a cache would take the state
    handed.settle()
    return output
