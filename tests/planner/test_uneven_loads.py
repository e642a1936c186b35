"""Sizes of layer calls that are common to processes with other loads."""

from __future__ import annotations

from dataclasses import replace

from lightning_memo.artifacts.costs import CallCosts
from lightning_memo.planner.token_slices import SavedBytes
from lightning_memo.runtime.solve_plan import largest_loads, largest_saved

CALL = CallCosts(
    input_bytes=8, attention_bytes=9, other_bytes=100, products=(), forward_seconds=1.0, backward_seconds=2.0,
    attention_seconds=0.1, elementwise_seconds=0.5,
)  # fmt: skip


def test_layers_that_differ_in_their_loads_get_the_size_of_the_largest() -> None:
    others = replace(CALL, input_bytes=16)  # of another kind
    mine = [CALL, others, replace(CALL, other_bytes=50, forward_seconds=3.0)]
    theirs = [replace(CALL, other_bytes=n) for n in (120, 130)]
    found = largest_loads([mine, [theirs[0], others, theirs[1]]])
    assert found == [replace(CALL, other_bytes=130), others, replace(CALL, other_bytes=130, forward_seconds=3.0)]


def test_saved_tensors_of_a_kind_are_those_of_the_process_with_most_of_it() -> None:
    key, much, little, empty = (
        SavedBytes("key", 7),
        SavedBytes("other", 9),
        SavedBytes("other", 4),
        SavedBytes("out", 1),
    )
    assert largest_saved([[[key, little, little]], [[much, key]]]) == [[key, much]]
    assert largest_saved([[[key]], [[empty, key]]]) == [[key, empty]]
