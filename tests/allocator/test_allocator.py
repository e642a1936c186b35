"""The planned allocator of the CPU: recording, serving, and its counters."""

import os
import threading

import numpy as np
import pytest
import torch
from support.markers.extras import needs_compiler
from torch.utils.data import DataLoader, Dataset

from lightning_memo.allocator import FREE, MALLOC, PlannedAllocator
from lightning_memo.profiler.memory_meter import PeakMeter
from lightning_memo.utils import native_build as native

KIB = 1024
MIB = KIB * KIB


pytestmark = needs_compiler


def block(size_bytes):
    return torch.empty(size_bytes, dtype=torch.uint8)


def serve(allocator, *phases, arena_bytes=16 * MIB, min_bytes=KIB):
    """Each phase is a list of (size, offset) in KiB."""
    columns = [np.array(slots, np.int64).reshape(-1, 2) * KIB for slots in phases]
    allocator.serve([(column[:, 0], column[:, 1]) for column in columns], arena_bytes, min_bytes)


@pytest.mark.slow
def test_planned_blocks_lie_at_their_offsets(allocator):
    serve(allocator, [(4, 0), (8, 4), (4, 100)])
    allocator.phase(0)
    first, second, third = block(4 * KIB), block(8 * KIB), block(4 * KIB)
    assert second.data_ptr() - first.data_ptr() == 4 * KIB
    assert third.data_ptr() - first.data_ptr() == 100 * KIB
    assert first.data_ptr() % 64 == 0
    first.fill_(1)
    second.fill_(2)
    assert (first.numpy() == 1).all() and (second.numpy() == 2).all()
    stats = allocator.stats()
    assert (stats.hits, stats.misses, stats.live_blocks) == (3, 0, 3)
    assert stats.live_bytes == 16 * KIB and stats.arena_bytes == 16 * MIB


def test_a_place_is_used_again_only_when_it_is_free(allocator):
    serve(allocator, [(4, 0), (8, 2), (4, 0)])
    allocator.phase(0)
    first = block(4 * KIB)
    address = first.data_ptr()
    overlapping = block(8 * KIB)
    assert overlapping.data_ptr() != address + 2 * KIB
    assert allocator.stats().miss_overlap == 1
    del first
    assert block(4 * KIB).data_ptr() == address


def test_peak_of_live_bytes(allocator):
    serve(allocator, [(4, 0), (8, 4)])
    allocator.phase(0)
    first, second = block(4 * KIB), block(8 * KIB)
    del first, second
    assert (allocator.stats().live_bytes, allocator.stats().peak_live_bytes) == (0, 12 * KIB)
    allocator.reset_stats()
    assert allocator.stats().peak_live_bytes == 0


def test_misses_by_reason(allocator):
    serve(allocator, [(4, 0), (8, -1), (4, 0)], arena_bytes=4 * KIB)
    allocator.phase(0)
    kept = [block(5 * KIB), block(4 * KIB), block(8 * KIB), block(4 * KIB), block(4 * KIB)]
    stats = allocator.stats()
    assert (stats.miss_size, stats.unplanned, stats.miss_overlap, stats.miss_end) == (1, 1, 1, 1)
    assert (stats.hits, stats.fitted, stats.served) == (1, 0, 1)
    assert len(kept) == 5 and stats.misses == 4
    assert (stats.served_bytes, stats.missed_bytes) == (4 * KIB, 21 * KIB)


def test_what_has_no_place_gets_the_highest_free_bytes(allocator):
    serve(allocator, [(4, 0), (8, -1), (4, 0)], arena_bytes=16 * KIB)
    allocator.phase(0)
    first, larger, second, third = block(4 * KIB), block(5 * KIB), block(4 * KIB), block(3 * KIB)
    offsets = [one.data_ptr() - first.data_ptr() for one in (larger, second, third)]
    assert offsets == [11 * KIB, 7 * KIB, 4 * KIB]
    left_out, too_large = block(8 * KIB), block(2 * KIB)
    stats = allocator.stats()
    assert (stats.served_bytes, stats.missed_bytes) == (16 * KIB, 10 * KIB)
    assert (stats.hits, stats.fitted, stats.unplanned, stats.misses) == (1, 3, 1, 2)
    assert (stats.miss_size, stats.miss_overlap, stats.live_blocks, stats.live_bytes) == (3, 1, 4, 16 * KIB)
    for number, one in enumerate((first, larger, second, third, left_out, too_large)):
        one.fill_(number)
    assert [one.unique().tolist() for one in (first, larger, second, third)] == [[0], [1], [2], [3]]
    del larger
    assert block(5 * KIB).data_ptr() - first.data_ptr() == 11 * KIB


def test_requests_that_are_not_in_the_lane_are_left_alone(allocator):
    serve(allocator, [(4, 0)])
    made = []

    def other():
        made.append(block(4 * KIB))

    allocator.phase(0)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert allocator.stats().foreign == 1
    made.append(block(100))  # too small to be planned
    allocator.leave()
    made.append(block(4 * KIB))
    assert allocator.stats().outside == 1
    assert allocator.stats().hits == 0 and allocator.stats().misses == 0
    allocator.phase(7)  # the plan doesn't have it
    made.append(block(4 * KIB))
    assert allocator.stats().miss_end == 1


def test_other_threads_join_the_lane_and_free_its_blocks(allocator):
    serve(allocator, [(4, 0)], [(4, 4)])
    allocator.phase(0)
    blocks = [block(4 * KIB)]

    def backward():
        allocator.phase(1)
        blocks.append(block(4 * KIB))
        blocks.pop(0)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert (allocator.stats().hits, allocator.stats().live_blocks) == (2, 1)


def test_a_missing_request_is_skipped(allocator):
    serve(allocator, [(4, 0), (8, 4), (16, 12)])
    allocator.phase(0)
    first, third = block(4 * KIB), block(16 * KIB)
    assert third.data_ptr() - first.data_ptr() == 12 * KIB
    assert (allocator.stats().hits, allocator.stats().out_of_order) == (2, 1)


def test_requests_that_come_and_go_leave_the_others_their_places(allocator):
    """Additional requests, such as those of packed documents of other lengths, do not make other requests miss."""
    serve(allocator, [(4, 0), *[(16, -1)] * 12, (8, 4), (4, 12), (4, 16)])
    allocator.phase(0)
    blocks = [block(4 * KIB), *[block(12 * KIB) for _ in range(20)], *[block(n * KIB) for n in (8, 4, 4)]]
    found = [each.data_ptr() - blocks[0].data_ptr() for each in (blocks[0], *blocks[-3:])]
    assert found == [0, 4 * KIB, 12 * KIB, 16 * KIB]
    stats = allocator.stats()
    assert (stats.hits, stats.miss_size, stats.fitted, stats.misses) == (4, 20, 20, 0)


def test_what_is_served_in_turn_only_takes_no_other_place(allocator):
    """One more request of a size does not make later ones of this size take each other's places."""
    columns = np.array([(4, 0), (2, 4), (4, 8), (1, 12), (4, 16)], np.int64) * KIB
    in_turn = [columns[:, 0] == 4 * KIB]
    allocator.serve([(columns[:, 0], columns[:, 1])], 64 * KIB, KIB, in_turn)
    allocator.phase(0)
    blocks = [block(size * KIB) for size in (4, 4, 2, 4, 1, 4)]
    offsets = [(each.data_ptr() - blocks[0].data_ptr()) // KIB for each in blocks]
    assert offsets == [0, 60, 4, 8, 12, 16]
    assert (allocator.stats().hits, allocator.stats().fitted, allocator.stats().miss_end) == (5, 1, 1)


def test_an_interrupted_phase_begins_again_at_its_first_request(allocator):
    serve(allocator, [(4, 0), (4, 4), (4, 8)])
    allocator.phase(0)
    kept = block(4 * KIB)  # and here the step ended, by an exception
    address = kept.data_ptr()
    del kept
    allocator.phase(0)
    blocks = [block(4 * KIB) for _ in range(3)]
    assert [one.data_ptr() - address for one in blocks] == [0, 4 * KIB, 8 * KIB]


def test_a_new_plan_respects_the_blocks_of_the_old_one(allocator):
    serve(allocator, [(4, 2)])
    allocator.phase(0)
    old = block(4 * KIB)
    serve(allocator, [(4, 0), (4, 8)])
    allocator.phase(0)
    blocked, free = block(4 * KIB), block(4 * KIB)
    assert allocator.stats().miss_overlap == 1
    assert free.data_ptr() - old.data_ptr() == 6 * KIB
    assert blocked.data_ptr() != old.data_ptr() - 2 * KIB
    del old
    allocator.phase(0)
    assert block(4 * KIB).data_ptr() == free.data_ptr() - 8 * KIB


def test_a_larger_arena_needs_the_old_one_empty(allocator):
    serve(allocator, [(4, 0)], arena_bytes=4 * KIB)
    allocator.phase(0)
    kept = block(4 * KIB)
    with pytest.raises(RuntimeError, match="1 planned blocks are alive"):
        serve(allocator, [(8, 0)], arena_bytes=8 * KIB)
    assert kept.fill_(3).sum() == 3 * 4 * KIB
    del kept
    serve(allocator, [(8, 0)], arena_bytes=8 * KIB)
    assert allocator.stats().arena_bytes == 8 * KIB


@pytest.mark.parametrize(
    ("slot", "message"),
    [
        ((4096, 8192), "phase 0, request 0: 4096 bytes at offset 8192, beyond the arena's 8192"),
        ((4096, 100), "not a multiple of 64"),
        ((512, 0), "requests below 1024 are never planned"),
        ((0, 0), "are never planned"),
    ],
)
def test_wrong_plans_are_refused(allocator, slot, message):
    with pytest.raises(ValueError, match=message):
        allocator.serve([(np.array([slot[0]]), np.array([slot[1]]))], 8192, KIB)
    assert allocator.stats().arena_bytes == 0


def test_wrong_arguments_are_refused(allocator):
    with pytest.raises(ValueError, match="phase 0: 2 sizes, but 1 offsets"):
        allocator.serve([(np.zeros(2), np.zeros(1))], 8192, KIB)
    with pytest.raises(ValueError, match="arena_bytes=0"):
        allocator.serve([], 0, KIB)
    with pytest.raises(ValueError, match="min_bytes=-1"):
        allocator.record(-1)
    with pytest.raises(ValueError, match="'meta'"):
        PlannedAllocator(torch.device("meta"))


def test_an_arena_that_does_not_fit_is_an_error_and_nothing_else(allocator):
    with pytest.raises(RuntimeError, match="no memory for an arena of"):
        serve(allocator, [(4, 0)], arena_bytes=1 << 60)
    allocator.phase(0)
    assert block(4 * KIB).fill_(1).sum() == 4 * KIB


def test_release_waits_for_the_last_block(allocator):
    serve(allocator, [(4, 0), (4, 4)])
    allocator.phase(0)
    kept = block(4 * KIB).fill_(7)
    assert not allocator.release()
    late = block(4 * KIB)  # no longer served
    assert allocator.stats().hits == 1
    assert kept.unique().tolist() == [7] and late.numel() == 4 * KIB
    del kept
    assert allocator.stats().arena_bytes == 0
    assert allocator.release()


def test_uninstalling_leaves_living_blocks_valid(allocator):
    before = block(4 * KIB).fill_(1)
    serve(allocator, [(4, 0)])
    allocator.phase(0)
    planned, delegated = block(4 * KIB).fill_(2), block(8 * KIB).fill_(3)
    allocator.uninstall()
    allocator.uninstall()
    assert not allocator.installed
    after = block(4 * KIB).fill_(4)
    assert [int(one[0]) for one in (before, planned, delegated, after)] == [1, 2, 3, 4]
    del before, planned, delegated
    assert allocator.stats().live_blocks == 0
    allocator.install()
    allocator.install()
    assert allocator.installed
    del after


def test_a_recording_has_each_request_once(allocator):
    old = block(4 * KIB)
    allocator.record(KIB)
    unseen = block(4 * KIB)
    allocator.phase(0)
    first, second = block(4 * KIB), block(8 * KIB)
    small = block(100)
    del second, old, unseen
    allocator.phase(3)
    third = block(2 * KIB)
    allocator.leave()
    late = block(4 * KIB)
    del first
    events = allocator.take_events()
    rows = [(int(e["kind"]), int(e["phase"]), int(e["sequence"]), int(e["id"]), int(e["size"])) for e in events]
    base = rows[0][3]
    assert [(kind, phase, sequence, id_ - base, size) for kind, phase, sequence, id_, size in rows] == [
        (MALLOC, 0, 0, 0, 4 * KIB),
        (MALLOC, 0, 1, 1, 8 * KIB),
        (FREE, 0, 2, 1, 8 * KIB),
        (MALLOC, 3, 0, 2, 2 * KIB),
        (FREE, -1, -1, 0, 4 * KIB),
    ]
    assert (np.diff(events["ns"]) >= 0).all() and len(set(events["thread"])) == 1
    del third
    assert allocator.take_events()["kind"].tolist() == [FREE]
    assert len(allocator.take_events()) == 0
    assert small.numel() + late.numel() > 0


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_says_so():
    with pytest.raises(native.BuildError, match="built without CUDA"):
        PlannedAllocator(torch.device("cuda"))


class Ones(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(2000) * index + block(4 * KIB).fill_(1)[:2000]


def test_forked_workers_are_not_planned(allocator):
    serve(allocator, [(32, 0), (4, 32)])
    allocator.phase(0)
    kept = block(32 * KIB).fill_(5)
    loader = DataLoader(Ones(), batch_size=2, num_workers=2, multiprocessing_context="fork")
    total = sum(float(batch.sum()) for batch in loader)
    assert total == sum((index + 1) * 2000 for index in range(8))
    assert kept.unique().tolist() == [5]
    assert allocator.stats().live_blocks == 1


def test_a_forked_child_may_free_planned_blocks(allocator):
    serve(allocator, [(4, 0)])
    allocator.phase(0)
    kept = [block(4 * KIB).fill_(5)]
    child = os.fork()
    if child == 0:
        good = kept.pop().sum() == 5 * 4 * KIB and block(4 * KIB) is not None
        stats = allocator.stats()
        os._exit(0 if good and stats.live_blocks == 0 and stats.hits == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert kept[0].unique().tolist() == [5] and allocator.stats().live_blocks == 1


def test_the_profiler_sees_served_blocks_as_native_ones(allocator):
    def peak_bytes():
        with PeakMeter(torch.device("cpu")) as meter:
            allocator.phase(0)
            first, second = block(400 * KIB), block(200 * KIB)
            del first
            third = block(300 * KIB)
            del second, third
        return meter.peak_bytes

    expected = peak_bytes()
    assert expected >= 600 * KIB
    serve(allocator, [(400, 0), (200, 400), (300, 0)], min_bytes=100 * KIB)
    assert peak_bytes() == expected
    assert (allocator.stats().hits, allocator.stats().misses) == (3, 0)
