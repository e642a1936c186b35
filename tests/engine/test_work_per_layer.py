"""What a layer call costs the host does not depend on the number of layers."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from support.families import FAMILIES, make_batch
from support.harness import EngineUnderTest
from support.markers.slow import slow_if

from lightning_memo.artifacts.swap_plan import StreamFromHost

COUNTS = (4, 16, 28)  # of layers, equally far apart
CHANCE = 64  # calls, most of them where a copy has not ended yet; one for each pair of layers would be 144


def calls_in(work: Callable[[], object]) -> int:
    """Return the number of calls of functions, of Python and of C, in this thread, without those that wait."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename != threading.__file__

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def work_of(layers: int, alpha: float, slice_tokens: int | None, stream_from_host: StreamFromHost) -> list[int]:
    """Return the calls of a profiled step, of making its plan, of the first step by it, and of a later one."""
    batch = make_batch(1, 16)
    model = FAMILIES["llama" if stream_from_host == "model" else "block"].build(num_hidden_layers=layers)
    with EngineUnderTest(model, None, slice_tokens, stream_from_host) as under_test:
        return [
            calls_in(lambda: under_test.profile_step(batch)),
            calls_in(lambda: under_test.load(alpha)),
            *(calls_in(lambda: under_test.step(batch)) for _ in range(2)),
        ]


@slow_if(lambda alpha: alpha != 0.5)
@pytest.mark.parametrize(
    ("alpha", "slice_tokens", "stream_from_host"),
    [
        (0.0, None, "none"),
        (0.5, None, "none"),
        (1.0, 8, "attention"),
        (0.5, 8, "hidden"),
        (1.0, 8, "model"),
    ],
)
def test_the_work_of_a_layer_call_is_the_same_in_a_deep_model(
    alpha: float, slice_tokens: int | None, stream_from_host: StreamFromHost
) -> None:
    work_of(2, alpha, slice_tokens, stream_from_host)  # what is done once in a process
    few, more, most = (work_of(layers, alpha, slice_tokens, stream_from_host) for layers in COUNTS)
    bend = [a - 2 * b + c for a, b, c in zip(few, more, most, strict=True)]
    assert all(abs(calls) <= CHANCE for calls in bend), f"calls of {COUNTS} layers: {few}, {more}, {most}"
