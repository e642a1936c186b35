"""The planned allocator on a GPU: together with PyTorch's own, on streams and threads, and in training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.markers.extras import needs_compiler
from torch import Tensor

from lightning_memo.allocator import PlannedAllocator

KIB, MIB = 2**10, 2**20
ALIGNMENT = 512
CYCLES = 200_000_000  # at most a fifth of a second


pytestmark = needs_compiler


def block(size_bytes: int, device: torch.device) -> Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def serve(
    allocator: PlannedAllocator, *phases: list[tuple[int, int]], arena_bytes: int = 64 * MIB, min_bytes: int = KIB
) -> None:
    """Each phase is a list of (size, offset) in KiB."""
    columns = [np.array(slots, np.int64).reshape(-1, 2) * KIB for slots in phases]
    allocator.serve([(column[:, 0], column[:, 1]) for column in columns], arena_bytes, min_bytes)


def warm_up(device: torch.device) -> None:
    """Loads the kernels of the test in advance, because loading one may wait for the device."""
    torch.cuda._sleep(1)
    assert bool((block(KIB, device).fill_(1).clone() == 1).all())
    torch.cuda.synchronize()


# ---- the same on every device


def test_blocks_from_before_and_after_stay_valid(device):
    before = block(4 * KIB, device).fill_(1)
    planned = PlannedAllocator(device)
    planned.install()
    planned.install()
    try:
        assert planned.installed
        serve(planned, [(4, 0)])
        planned.phase(0)
        served, delegated = block(4 * KIB, device).fill_(2), block(8 * KIB, device).fill_(3)
    finally:
        planned.leave()
        planned.uninstall()
    planned.uninstall()
    assert not planned.installed
    after = block(4 * KIB, device).fill_(4)
    assert [int(one.unique()) for one in (before, served, delegated, after)] == [1, 2, 3, 4]
    del before, served, delegated
    assert planned.stats().live_blocks == 0
    assert planned.release()


def test_planned_blocks_lie_at_their_offsets(allocator, device):
    serve(allocator, [(4, 0), (8, 4), (4, 100)])
    allocator.phase(0)
    first, second, third = (block(size * KIB, device).fill_(size) for size in (4, 8, 4))
    assert second.data_ptr() - first.data_ptr() == 4 * KIB
    assert third.data_ptr() - first.data_ptr() == 100 * KIB
    allocator.leave()
    assert [int(one.unique()) for one in (first, second, third)] == [4, 8, 4]
    stats = allocator.stats()
    assert (stats.hits, stats.misses, stats.live_blocks, stats.live_bytes) == (3, 0, 3, 16 * KIB)


def test_a_place_that_is_occupied_is_refused(allocator, device):
    serve(allocator, [(4, 0), (8, 2), (4, 0)])
    allocator.phase(0)
    first = block(4 * KIB, device).fill_(1)
    address = first.data_ptr()
    overlapping = block(8 * KIB, device).fill_(2)
    assert allocator.stats().miss_overlap == 1
    assert abs(overlapping.data_ptr() - address) >= 4 * KIB
    assert int(first[-1]) == 1
    del first
    assert block(4 * KIB, device).data_ptr() == address


def test_places_are_multiples_of_what_kernels_want(allocator, device):
    with pytest.raises(ValueError, match=f"not a multiple of {64 if device.type == 'cpu' else ALIGNMENT}"):
        allocator.serve([(np.array([4096]), np.array([32]))], MIB, KIB)


def test_an_arena_that_does_not_fit_is_an_error_and_nothing_else(allocator, device):
    with pytest.raises(
        RuntimeError, match="no memory for an arena of" if device.type == "cpu" else "Tried to allocate"
    ):
        serve(allocator, [(4, 0)], arena_bytes=1 << 50)
    assert allocator.stats().arena_bytes == 0
    allocator.phase(0)
    assert int(block(4 * KIB, device).fill_(1).sum()) == 4 * KIB


# ---- beside PyTorch's allocator


def test_statistics_are_pytorchs(allocator, device):
    assert torch.cuda.memory.get_allocator_backend() == "native"
    before = torch.cuda.memory_allocated(device)
    serve(allocator, [(4, 0)], arena_bytes=32 * MIB)
    assert torch.cuda.memory_allocated(device) == before + 32 * MIB
    allocator.phase(0)
    planned, delegated = block(4 * KIB, device), block(34 * MIB, device)  # larger than the arena
    assert torch.cuda.memory_allocated(device) == before + 66 * MIB
    assert torch.cuda.memory_stats(device)["allocated_bytes.all.current"] == before + 66 * MIB
    del planned, delegated
    allocator.leave()
    assert allocator.release()
    assert torch.cuda.memory_allocated(device) == before


def test_the_snapshot_shows_the_arena_as_one_block(allocator, device):
    serve(allocator, [(4, 0)], arena_bytes=32 * MIB)
    allocator.phase(0)
    first = block(4 * KIB, device)
    blocks = [part for segment in torch.cuda.memory_snapshot() for part in segment["blocks"]]
    (found,) = (part for part in blocks if part["address"] == first.data_ptr())
    assert (found["size"], found["state"]) == (32 * MIB, "active_allocated")


def test_emptying_the_cache_keeps_what_is_planned(allocator, device):
    serve(allocator, [(4, 0), (4, 4)])
    allocator.phase(0)
    kept = block(4 * KIB, device).fill_(7)
    torch.cuda.empty_cache()
    assert block(4 * KIB, device).data_ptr() == kept.data_ptr() + 4 * KIB
    allocator.leave()
    assert int(kept.unique()) == 7


def test_what_does_not_fit_is_told_by_pytorch(allocator, device):
    serve(allocator, [(4, 0)])
    ooms = torch.cuda.memory_stats(device).get("num_ooms", 0)
    allocator.phase(0)
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate 1048576\.00 GiB"):
        block(1 << 50, device)
    assert torch.cuda.memory_stats(device)["num_ooms"] == ooms + 1
    assert allocator.stats().miss_size == 1
    assert block(4 * KIB, device).data_ptr() % ALIGNMENT == 0
    assert allocator.stats().hits == 1


def test_memory_pools_are_left_to_pytorch(allocator, device):
    serve(allocator, [(4, 0)])
    pool = torch.cuda.MemPool()
    allocator.phase(0)
    with torch.cuda.use_mem_pool(pool):
        pooled = block(4 * KIB, device)
    assert (allocator.stats().hits, allocator.stats().outside) == (0, 1)
    planned = block(4 * KIB, device)
    assert (allocator.stats().hits, allocator.stats().outside) == (1, 1)
    assert pooled.data_ptr() != planned.data_ptr()
    del pooled, pool


# ---- streams


def test_a_place_is_used_again_only_after_the_stream_that_reads_it(allocator, device):
    warm_up(device)
    serve(allocator, [(64, 0), (64, 0)])
    side = torch.cuda.Stream()
    allocator.phase(0)
    first = block(64 * KIB, device).fill_(7)
    address = first.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        seen = first.clone()
    assert allocator.stats().outside == 1  # memory of another stream
    first.record_stream(side)
    del first
    second = block(64 * KIB, device).fill_(0)
    assert second.data_ptr() == address
    allocator.leave()
    torch.cuda.current_stream().wait_stream(side)
    assert int(seen.unique()) == 7


def test_delegated_blocks_wait_for_other_streams_too(allocator, device):
    warm_up(device)
    side = torch.cuda.Stream()
    delegated = block(30 * MIB, device).fill_(7)  # a segment for itself
    address = delegated.data_ptr()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
    delegated.record_stream(side)
    del delegated
    assert not side.query()  # otherwise the next line would prove nothing
    other = block(30 * MIB, device)
    assert other.data_ptr() != address
    side.synchronize()
    assert block(30 * MIB, device).data_ptr() == address


def test_blocks_wait_for_other_streams_after_the_allocator_has_been_uninstalled(allocator, device):
    warm_up(device)
    side, host = torch.cuda.Stream(), torch.zeros(30 * MIB, dtype=torch.uint8).pin_memory()
    delegated = block(30 * MIB, device).fill_(7)
    allocator.uninstall()
    assert not allocator.installed
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
        host.copy_(delegated, non_blocking=True)
    delegated.record_stream(side)
    del delegated
    block(30 * MIB, device).fill_(0)
    side.synchronize()
    assert int(host.min()) == int(host.max()) == 7
    allocator.install()
    allocator.uninstall()


def test_the_arena_belongs_to_one_stream(allocator, device):
    serve(allocator, [(4, 0)])
    allocator.phase(0)
    kept = block(4 * KIB, device)
    allocator.leave()
    with torch.cuda.stream(torch.cuda.Stream()):
        with pytest.raises(RuntimeError, match="planned blocks of another device or stream are alive"):
            serve(allocator, [(4, 0)])
        del kept
        serve(allocator, [(4, 0)])
        allocator.reset_stats()
        allocator.phase(0)
        assert block(4 * KIB, device).data_ptr() % ALIGNMENT == 0
        assert allocator.stats().hits == 1
        allocator.leave()
