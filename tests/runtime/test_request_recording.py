"""Which of the recorded steps memory is planned for, and how much room larger ones get."""

import numpy as np
import pytest

from lightning_memo.allocator import EVENT, FREE, MALLOC
from lightning_memo.runtime.request_recording import RecordedStep, RequestRecording

STEADY = [(64, 64)] * 3


def step(number, sizes):
    """A step that makes these requests in one phase, and frees their buffers at its end."""
    ids = [100 * number + index for index in range(len(sizes))]
    mallocs = [(MALLOC, 0, index, 0, own, size, 0, 0) for index, (own, size) in enumerate(zip(ids, sizes, strict=True))]
    frees = [(FREE, 0, len(sizes), 0, own, size, 0, 0) for own, size in zip(ids, sizes, strict=True)]
    return RecordedStep(np.array(mallocs + frees, EVENT), (0,))


def record(steps):
    """What the recording returns for each step."""
    recording = RequestRecording(alignment=64)
    return [recording.add(step(number, sizes), ["input"]) for number, sizes in enumerate(steps)]


def test_three_steps_that_are_alike_are_enough():
    *earlier, last = record(STEADY)
    assert earlier == [None, None]
    assert last.trace.size.tolist() == [64, 64]
    assert (last.room_bytes, last.varying, last.occasional) == (0, {}, {})


@pytest.mark.parametrize("other", [(64, 128), (64,), (64, 64, 64)])
def test_two_equal_steps_among_others_are_not(other):
    assert record([(64, 64), (64, 64), other, (64, 64), (64, 64)]) == [None] * 5
    last = record([other, *STEADY])[-1]
    assert last.trace.size.tolist() == [64, 64] and last.room_bytes == 0


def test_of_steps_that_vary_the_largest_is_planned_with_room_for_larger_ones():
    *earlier, last = record([(10**6,), (64,), (640, 640), (128,), (1280, 64), (192,), (1024,), (10**6,)])
    assert earlier == [None] * 7
    assert last.trace.size.tolist() == [1280, 64]
    assert last.room_bytes == (1344 - 64) // 5  # six steps count: the frees of the last one are not known


def test_steps_of_one_size_need_no_room():
    last = record([(64, 128, 256, 64) if number % 2 else (128, 64, 64, 64, 192) for number in range(8)])[-1]
    assert last.trace.size.sum() == 512 and last.room_bytes == 0
    assert last.varying == {"input": (64,)} and last.occasional == {"input": (192, 256)}
