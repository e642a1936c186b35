"""The planned allocator on a GPU: together with PyTorch's own, on streams and threads, and in training."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch import Callback
from support.families import VOCABULARY
from support.trainer_harness import LanguageModel, Result, fit, loader
from torch import Tensor, nn

from lightning_memo import MemoStrategy
from lightning_memo.allocator import FREE, MALLOC, AllocatorStats, PlannedAllocator
from lightning_memo.runtime.memory_plans import memory_planner as planning
from lightning_memo.utils import native_build as native

KIB, MIB = 2**10, 2**20
ALIGNMENT = 512
CYCLES = 200_000_000  # at most a fifth of a second


def has_compiler() -> bool:
    try:
        native.find_compiler()
    except native.BuildError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


@pytest.fixture
def allocator(device: torch.device) -> Iterator[PlannedAllocator]:
    """An installed allocator, which is uninstalled after the test even if it fails."""
    torch.ones(1, device=device)  # PyTorch's allocator is in use already, as in training
    torch.cuda.empty_cache()  # blocks of other tests might be given, with a little more than was asked for
    planned = PlannedAllocator(device)
    planned.install()
    planned.reset_stats()
    yield planned
    gc.collect()  # of a test that failed
    planned.leave()
    planned.release()
    planned.take_events()
    planned.uninstall()
    stats = planned.stats()
    assert (stats.live_blocks, stats.arena_bytes, stats.bad_frees) == (0, 0, 0)


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
    planned, delegated = block(4 * KIB, device), block(30 * MIB, device)
    assert torch.cuda.memory_allocated(device) == before + 62 * MIB
    assert torch.cuda.memory_stats(device)["allocated_bytes.all.current"] == before + 62 * MIB
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


# ---- training


def places(events: np.ndarray) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """A plan with separate bytes for each request of a recorded step: sizes and offsets per phase, and arena bytes."""
    mallocs = events[(events["kind"] == MALLOC) & (events["sequence"] >= 0)]
    ends = np.cumsum(-(-mallocs["size"] // ALIGNMENT) * ALIGNMENT)
    offsets = np.concatenate([[0], ends[:-1]])
    phases = []
    for index in range(int(mallocs["phase"].max()) + 1):
        inside = mallocs["phase"] == index
        phases.append((mallocs["size"][inside], offsets[inside]))
    return phases, int(ends[-1])


def test_backward_in_autograds_thread_is_recorded_and_served(allocator, device):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    data = torch.randn(32, 64, device=device)

    def step() -> list[Tensor]:
        """Gradients. The phase of the backward begins in the thread that runs it."""
        model.zero_grad()
        allocator.phase(0)
        loss = (model(data) - data).square().mean()
        loss.register_hook(lambda grad: allocator.phase(1))
        loss.backward()
        allocator.leave()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for _ in range(2):  # libraries take their workspaces
        expected = step()
    allocator.record(KIB)
    step()
    model.zero_grad()
    events = allocator.take_events()
    mallocs = events[events["kind"] == MALLOC]
    assert (mallocs["sequence"] >= 0).all()
    threads = {phase: set(mallocs["thread"][mallocs["phase"] == phase].tolist()) for phase in (0, 1)}
    assert len(threads[0]) == len(threads[1]) == 1
    assert threads[0] == threads[1] if device.type == "cpu" else threads[0] != threads[1]
    assert (events["kind"] == FREE).sum() >= len(mallocs) - 1  # all but the loss, at least
    phases, arena_bytes = places(events)
    assert all(len(sizes) > 0 for sizes, _ in phases)
    allocator.serve(phases, arena_bytes, KIB)
    allocator.reset_stats()
    for _ in range(3):
        served = step()
        assert all(torch.equal(one, other) for one, other in zip(served, expected, strict=True))
    stats = allocator.stats()
    assert (stats.hits, stats.misses, stats.out_of_order) == (3 * len(mallocs), 0, 0)
    model.zero_grad()
    del expected, served


@dataclass
class Watch(Callback):
    """Waits for background work, and records the counters and the memory of PyTorch's allocator."""

    stats: list[AllocatorStats] = field(default_factory=list)
    reserved_bytes: int = 0
    retries: int = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        memory = trainer.strategy.memory
        deadline = time.monotonic() + 120
        while memory is not None and memory.busy and time.monotonic() < deadline:
            time.sleep(0.002)
        if memory is not None and memory.stats is not None:
            self.stats.append(memory.stats)
        if torch.cuda.is_available():
            self.reserved_bytes = torch.cuda.memory_reserved()
            self.retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)


def small_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def train(device: torch.device, plan_memory: bool, steps: int = 20) -> tuple[Result, Watch]:
    # Sequences of 64 tokens: the flash kernel adds up the gradients of longer ones in no fixed order. And so many that
    # activations are far larger than the segments of PyTorch's allocator.
    batch = 128 if device.type == "cuda" else 2
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_accumulated_memory_stats()
    watch = Watch()
    result = fit(
        MemoStrategy(alpha=0.5, plan_memory=plan_memory, attention="sdpa"),
        LanguageModel(small_llama), loader(8 * batch, 64, batch),
        accelerator="gpu" if device.type == "cuda" else "cpu", precision="bf16-true", max_steps=steps,
        callbacks=[watch],
    )  # fmt: skip
    return result, watch


@pytest.fixture(scope="module")
def plans_elsewhere(tmp_path_factory) -> Iterator[None]:
    """Hides the plans of earlier runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "cache_folder", lambda: tmp_path_factory.mktemp("plans"))
        yield


def test_training_with_a_plan_is_bit_identical(device, plans_elsewhere):
    planned, watch = train(device, plan_memory=True)
    unplanned, _ = train(device, plan_memory=False)
    assert planned.losses == unplanned.losses
    assert len(planned.losses) == 20
    for ours, theirs in zip(planned.module.parameters(), unplanned.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    last = watch.stats[-1]
    assert len(watch.stats) >= 8 and last.hits > 0
    assert watch.retries == 0
    assert (last.misses, last.out_of_order, last.bad_frees) == (0, 0, 0)
    assert not PlannedAllocator(device).installed


def test_training_with_a_plan_reserves_no_more(device, plans_elsewhere):
    planned = train(device, plan_memory=True)[1]
    unplanned = train(device, plan_memory=False)[1]
    assert planned.stats
    assert planned.retries == 0
    assert planned.reserved_bytes <= unplanned.reserved_bytes
