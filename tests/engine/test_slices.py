"""Many slices and mixed actions, the memory they take, and the parts that slices are made of."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.alpha_plans import SWAPPED, slices_at
from support.devices import DEVICE
from support.families import FAMILIES, make_batch
from support.harness import (
    Batch,
    EngineUnderTest,
    Step,
    assert_equal,
    beside,
    gradients_of,
    in_double,
    loss_and_gradients,
    planned,
)
from support.markers.slow import slow_if
from torch import Tensor, nn

from lightning_memo.artifacts.costs import MOVED, Place
from lightning_memo.engine import Engine, TestMode
from lightning_memo.engine.copy_streams import ThreadCopyStream
from lightning_memo.engine.forward.autocast import autocast_inputs
from lightning_memo.engine.forward.cut_tokens import cut
from lightning_memo.engine.forward.intercept import LayerMode, current_handler, handling
from lightning_memo.engine.memory import host
from lightning_memo.engine.memory.host import HostArena, HostBuffer
from lightning_memo.engine.memory.host_pages import HostPages
from lightning_memo.engine.memory.saved_storages import Registry, gapless_strides, is_dense
from lightning_memo.engine.memory.slot_memory import Slot, SlotMemory, SlotShare
from lightning_memo.engine.saved_tensors.call_arguments import NonActivations
from lightning_memo.kernels import AttentionSpec
from lightning_memo.planner.token_slices import (
    ALIGNMENT_BYTES,
    KEPT,
    RECOMPUTED,
    SavedBytes,
    TokenRange,
    aligned,
    slot_bytes,
    stored_bytes,
)

KEEP, SWAP, RECOMPUTE = KEPT, SWAPPED, RECOMPUTED
Places = tuple[tuple[str, Place], ...]
SHAPES = [(1, 61, 15), (2, 64, 13)]  # batch, tokens, slice_tokens: five slices, of which the last has one or 12 tokens
WITH_ALL = ("llama_gqa", "mixtral")
# Farthest from fp64, in units of plain training's distance; see test_gradients.
FARTHER = 1.25


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family].build().train()


@dataclass(frozen=True)
class Trained:
    """A family's model and a batch, and what plain training makes of them in fp32 and in fp64."""

    family: str
    batch: Batch

    @functools.cached_property
    def plain(self) -> Step:
        return loss_and_gradients(build(self.family), self.batch)

    @functools.cached_property
    def exact(self) -> Step:
        return loss_and_gradients(in_double(build(self.family)), self.batch)

    def assert_as_good(self, actual: Step) -> None:
        """The gradient is within 1e-6 of `plain`, or as near to `exact`: every slice rounds weight gradients again."""
        torch.testing.assert_close(actual.loss, self.plain.loss, rtol=1e-6, atol=0)
        if actual.distance(self.plain) > 1e-6:
            assert actual.distance(self.exact) <= FARTHER * self.plain.distance(self.exact)


@functools.cache
def trained(family: str, batch: int, tokens: int) -> Trained:
    return Trained(family, make_batch(batch, tokens))


# ---- whole models


def _profiles() -> Iterator[object]:
    for name, family in FAMILIES.items():
        needs_nest = not family.causal or name == "gpt2_dropout"  # attention dropout
        for joint in (False,) if needs_nest else (False, True):
            # Other families run with and without joint attention, and with each shape.
            for shape in SHAPES if not joint or name in WITH_ALL else SHAPES[1:]:
                schedule = "nest" if joint else "auto"
                yield pytest.param((name, joint, shape), id=f"{name}-{schedule}-{shape[0]}x{shape[1]}by{shape[2]}")


@pytest.fixture(scope="module", params=_profiles())
def profiled(request: pytest.FixtureRequest) -> Iterator[tuple[EngineUnderTest, Trained, int]]:
    name, joint, (batch_size, tokens, slice_tokens) = request.param
    subject = trained(name, batch_size, tokens)
    with EngineUnderTest(build(name), joint_attention=joint) as under_test:
        under_test.profile_step(subject.batch)
        yield under_test, subject, slice_tokens


slow_profile = slow_if(lambda profiled: profiled[0] not in WITH_ALL and profiled[1:] != ("auto", SHAPES[0]))


def used_bytes(engine: Engine) -> tuple[int, ...]:
    """Bytes in the slot of each layer call that is alive."""
    return tuple(group.slot.used_bytes for group in engine.offload_groups if group.slot is not None)


@slow_if(lambda profiled, alpha: alpha != 0.3 and (profiled[0] != "llama_gqa" or profiled[2] != SHAPES[0]))
@slow_profile
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0], ids=lambda alpha: f"alpha{alpha:g}")
def test_many_slices(profiled: tuple[EngineUnderTest, Trained, int], alpha: float) -> None:
    under_test, subject, slice_tokens = profiled
    predicted = under_test.load(alpha, slice_tokens)
    engine, memory = under_test.engine, under_test.engine.memory
    assert memory is not None
    swapped_calls = len(engine.layers) - 2
    assert memory.host.arena.size_bytes == engine.host_bytes == swapped_calls * max(predicted)

    model = under_test.model
    model.zero_grad()
    torch.manual_seed(5)
    loss = model(**beside(model, subject.batch)).loss
    runs: list[Any] = list(engine.calls)
    assert all(len(run.slices) >= 5 for run in runs)
    assert used_bytes(engine) == predicted
    del runs
    loss.backward()
    under_test.assert_as_planned()
    under_test.assert_empty()
    assert memory.stats.peak_host_bytes == engine.host_bytes
    subject.assert_as_good(Step(loss.detach(), gradients_of(model)))


@slow_if(lambda profiled, alpha: alpha != 0.5 and profiled[0] not in WITH_ALL)
@slow_profile
@pytest.mark.parametrize("alpha", [0.0, 1 / 8, 1 / 2, 1.0], ids=lambda alpha: f"alpha{alpha:g}")
def test_slots_are_filled_as_predicted(profiled: tuple[EngineUnderTest, Trained, int], alpha: float) -> None:
    """To the byte, also for routed experts: the sum of what they save is proportional to tokens."""
    under_test, subject, _ = profiled
    predicted = under_test.load(alpha)
    loss = under_test.model(**beside(under_test.model, subject.batch)).loss
    assert used_bytes(under_test.engine) == predicted
    del loss
    under_test.assert_as_planned()
    under_test.assert_empty()


def _ranges(*parts: tuple[int, Places]) -> tuple[TokenRange, ...]:
    stops = [sum(tokens for tokens, _ in parts[: n + 1]) for n in range(len(parts))]
    return tuple(TokenRange(stop - n, stop, action) for stop, (n, action) in zip(stops, parts, strict=True))


MIXES = {
    "keep": _ranges((61, KEEP)),
    "keep_keep": _ranges((20, KEEP), (41, KEEP)),
    "swap_keep": _ranges((31, SWAP), (30, KEEP)),
    "keep_recompute": _ranges((1, KEEP), (60, RECOMPUTE)),
    "recompute_swap": _ranges((30, RECOMPUTE), (31, SWAP)),
    "recompute_keep_swap": _ranges((17, RECOMPUTE), (2, KEEP), (42, SWAP)),
    "one_token_last": _ranges((30, SWAP), (30, RECOMPUTE), (1, RECOMPUTE)),
    "sixteen": _ranges(*[(1 + n % 7, (SWAP, RECOMPUTE, KEEP, RECOMPUTE)[n % 4]) for n in range(15)], (4, SWAP)),
}


@pytest.fixture(scope="module")
def mixed(family: str, joint: bool) -> Iterator[tuple[EngineUnderTest, Trained]]:
    subject = trained(family, 2, 61)
    with EngineUnderTest(build(family), joint_attention=joint) as under_test:
        under_test.profile_step(subject.batch)
        yield under_test, subject


@slow_if(lambda family, joint, mix: family != "llama_gqa" and (joint or mix != "sixteen"))
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("joint", [False, True], scope="module", ids=["auto", "nest"])
@pytest.mark.parametrize(
    "family", ["llama_gqa", "mistral_window", "gpt2_dropout", "mixtral", "block_dropout"], scope="module"
)
def test_mixed_actions(mixed: tuple[EngineUnderTest, Trained], family: str, mix: str) -> None:
    under_test, subject = mixed
    predicted = under_test.load(0.5, script=MIXES[mix])
    actual = under_test.step(subject.batch)
    subject.assert_as_good(actual)
    if len(MIXES[mix]) == 1 and not FAMILIES[family].grouped:
        assert_equal(actual, subject.plain)
    under_test.assert_as_planned()
    memory = under_test.engine.memory
    assert memory is not None and max(predicted) == memory.slot_bytes


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2_dropout"])
def test_slot_bytes_of_other_lengths_follow_from_one_profile(family: str) -> None:
    """A plan for 61 tokens covers shorter batches, whose slices have other lengths."""
    model = build(family)
    with planned(model, make_batch(2, 61), 0.3, 13) as under_test:
        for tokens in (60, 53, 27, 14, 13, 4):
            batch = make_batch(2, tokens)
            under_test.step(batch)
            under_test.assert_as_planned()


# ---- slices.py


alphas = st.floats(0.0, 1.0)
lengths = st.integers(1, 5000)
longests = st.none() | st.integers(1, 700)


@given(lengths, alphas, longests)
def test_slices_cover_all_tokens_in_order(tokens: int, alpha: float, longest: int | None) -> None:
    slices = slices_at(tokens, alpha, longest)
    assert slices[0].start == 0 and slices[-1].stop == tokens
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
    assert all(0 < part.tokens <= (longest or tokens) for part in slices)
    actions = [part.places for part in slices]
    assert actions == sorted(actions, key=[SWAP, RECOMPUTE].index)


@given(lengths, alphas)
def test_alpha_is_the_share_of_swapped_tokens(tokens: int, alpha: float) -> None:
    slices = slices_at(tokens, alpha)
    swapped = sum(part.tokens for part in slices if part.places == SWAP)
    assert swapped <= alpha * tokens + 1e-3
    assert alpha * tokens - swapped < (128 if tokens >= 2048 else 1)
    assert len(slices) == (swapped > 0) + (swapped < tokens)


kinds = st.sampled_from(["input", "out", "lse", "query", "key", "value", "other"])
saved_tensors = st.lists(st.builds(SavedBytes, kinds, st.integers(1, 10**6), st.booleans()), min_size=1, max_size=12)


@given(saved_tensors, st.integers(1, 3000), alphas, alphas, st.booleans())
def test_slots_grow_with_alpha(saved: list[SavedBytes], tokens: int, a: float, b: float, joint: bool) -> None:
    """Apart from alignment and tensors whose size does not depend on tokens, of which two slices have two."""
    low, high = sorted((a, b))
    sizes = [
        stored_bytes(saved, tokens, slices_at(tokens, alpha), *MOVED, joint_attention=joint) for alpha in (low, high)
    ]
    slack = len(saved) * 2 * ALIGNMENT_BYTES + sum(item.size_bytes for item in saved if not item.per_token)
    assert sizes[0] <= sizes[1] + slack


@given(saved_tensors, st.integers(1, 3000), alphas, longests, st.booleans())
def test_slots_hold_what_is_always_swapped_and_no_more_than_all(
    saved: list[SavedBytes], tokens: int, alpha: float, longest: int | None, joint: bool
) -> None:
    slices = slices_at(tokens, alpha, longest)
    size = stored_bytes(saved, tokens, slices, *MOVED, joint_attention=joint)
    always = sum(item.size_bytes for item in saved if item.kind in ("input", "out", "lse"))
    most = sum(
        item.size_bytes * (1 if item.per_token else len(slices)) + 2 * ALIGNMENT_BYTES * len(slices) for item in saved
    )
    assert always <= size <= most


def test_slot_bytes_of_a_layer() -> None:
    saved = [
        SavedBytes("input", 6400), SavedBytes("out", 6400), SavedBytes("lse", 100), SavedBytes("query", 6400),
        SavedBytes("key", 3200), SavedBytes("value", 3200), SavedBytes("other", 64000),
        SavedBytes("other", 10, per_token=False),
    ]  # fmt: skip
    whole = 6400 + 6400 + 128
    attention = 6400 + 3200 + 3200
    assert slot_bytes(saved, 100, _ranges((100, RECOMPUTE))) == whole
    assert slot_bytes(saved, 100, _ranges((100, SWAP))) == whole + attention + 64000 + 64
    half_of_other = 3200 + 1600 + 1600 + 32000 + 64
    both_lse = 6400 + 6400 + 64 + 64
    assert slot_bytes(saved, 100, _ranges((50, SWAP), (50, RECOMPUTE))) == both_lse + half_of_other
    # The second slice attends to the keys and values of the first.
    assert slot_bytes(saved, 100, _ranges((50, RECOMPUTE), (50, RECOMPUTE))) == both_lse + 1600 + 1600
    slices = _ranges((50, RECOMPUTE), (50, RECOMPUTE))
    assert stored_bytes(saved, 100, slices, *MOVED, joint_attention=True) == whole
    assert slot_bytes(saved, 100, _ranges((100, KEEP))) == 6400


def test_cut_takes_the_tokens_of_tensors_that_have_them() -> None:
    batch, tokens, hidden = 2, 10, 6
    tree = {
        "per_token": torch.arange(tokens),
        "rows": torch.arange(batch * tokens).view(batch, tokens),
        "shared_rows": torch.arange(tokens * hidden).view(1, tokens, hidden),
        "other": torch.zeros(3, tokens, hidden),
        "square": torch.zeros(tokens, tokens),
        "value": (1.5, None, "text"),
    }
    parts = cut(tree, tokens, 3, 7, batch, 1)
    assert torch.equal(parts["per_token"], torch.arange(3, 7))
    assert torch.equal(parts["rows"], tree["rows"][:, 3:7])
    assert torch.equal(parts["shared_rows"], tree["shared_rows"][:, 3:7])
    assert parts["other"] is tree["other"] and parts["square"] is tree["square"]
    assert parts["value"] == tree["value"]
    assert cut(tree, tokens, 0, tokens, batch, 1) is tree
    tokens_first = torch.arange(tokens * batch * hidden).view(tokens, batch, hidden)
    assert torch.equal(cut(tokens_first, tokens, 3, 7, batch, 0), tokens_first[3:7])


# ---- regions.py


@st.composite
def strided(draw: st.DrawFn) -> Tensor:
    """A tensor with any order of dimensions, gaps, expanded dimensions and offsets."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    t = torch.randn(
        [size + draw(st.integers(0, 2)) for size in shape], dtype=draw(st.sampled_from([torch.float32, torch.float64]))
    )
    t = t.permute(draw(st.permutations(range(len(shape)))))
    for d in range(t.dim()):
        start = draw(st.integers(0, t.shape[d] - 1))
        t = t.narrow(d, start, draw(st.integers(1, t.shape[d] - start)))
        step = draw(st.integers(1, 2))
        t = t[(slice(None),) * d + (slice(None, None, step),)]
    d = draw(st.integers(0, t.dim() - 1))
    return t.narrow(d, 0, 1).expand(*t.shape) if draw(st.booleans()) else t


@given(st.lists(strided(), min_size=1, max_size=4))
def test_slot_returns_what_was_put_in(tensors: list[Tensor]) -> None:
    size = sum(aligned(t.nbytes) for t in tensors)
    slot = Slot(torch.zeros(size, dtype=torch.uint8), {"host": SlotShare(0, size)})
    stored = [slot.put(t) for t in tensors]
    assert slot.used_bytes == size
    for t, place in zip(tensors, stored, strict=True):
        assert place is not None and place.offset_bytes % ALIGNMENT_BYTES == 0
        back = slot.load(place)
        assert torch.equal(back, t) and back.dtype == t.dtype
        assert is_dense(back)
        if is_dense(t):
            assert back.stride() == t.stride()  # kernels pick their arithmetic by it
    assert slot.put(torch.zeros(1)) is None


@given(strided())
def test_gapless_strides_keep_the_order_of_dimensions(t: Tensor) -> None:
    strides = gapless_strides(t.shape, t)
    compact = torch.empty_strided(t.shape, strides)
    assert is_dense(compact) and compact.numel() == t.numel()
    expanded = any(size > 1 and stride == 0 for size, stride in zip(t.shape, t.stride(), strict=True))
    order = sorted(range(t.dim()), key=(torch.empty_like(t) if expanded else t).stride, reverse=True)
    assert sorted(strides, reverse=True) == [strides[d] for d in order]


def test_registry_finds_views() -> None:
    registry: Registry[str] = Registry()
    t = torch.arange(24.0).view(2, 3, 4)
    registry.add(t, "t")
    assert registry.find(t) == ("t", 0)
    assert registry.find(t.view(6, 4).transpose(0, 1)) == ("t", 0)
    assert registry.find(t[1, 1:]) == ("t", 16 * 4)
    assert registry.find(t.clone()) is None
    assert registry.find(t.view(torch.int32)[1]) == ("t", 12 * 4)
    registry.clear()
    assert registry.find(t) is None


def test_registry_knows_a_part_from_the_whole() -> None:
    registry: Registry[str] = Registry()
    whole = torch.arange(24.0)
    registry.add(whole[4:12], "part")
    assert registry.find(whole) is None
    assert registry.find(whole[3:8]) is None
    assert registry.find(whole[6:12]) == ("part", 2 * 4)


def test_registry_matches_tensors_with_gaps_only_as_they_are() -> None:
    """Their copy is compact, so another view of the same bytes would read something else."""
    registry: Registry[str] = Registry()
    whole = torch.arange(24.0).view(4, 6)
    registry.add(whole[:, :3], "gaps")
    assert registry.find(whole[:, :3]) == ("gaps", 0)
    assert registry.find(whole[:2, :3]) is None
    assert registry.find(whole[0, :3]) is None
    assert registry.find(whole[:, :3].transpose(0, 1)) is None


def test_registry_forgets_contents_that_changed_in_place() -> None:
    registry: Registry[str] = Registry()
    t = torch.zeros(8)
    registry.add(t, "before")
    t[0] = 1
    assert registry.find(t) is None
    registry.add(t, "after")
    assert registry.find(t) == ("after", 0)


def test_registry_never_matches_a_dead_storage() -> None:
    """Also if new tensors get the memory of a freed one."""
    registry: Registry[int] = Registry()
    seen, reused = set(), 0
    for n in range(200):
        t = torch.full((1024,), float(n))
        address = t.data_ptr()
        reused += address in seen
        seen.add(address)
        assert registry.find(t) is None
        registry.add(t, n)
        assert registry.find(t) == (n, 0)
        del t
    assert reused > 0


# ---- memory.py


def make_memory(slots: int = 4, size: int = 64, test_mode: TestMode | None = None) -> SlotMemory:
    return SlotMemory(size, slots * size, HostPages(DEVICE), test_mode=test_mode)


def fill(slot: Slot, value: float) -> None:
    assert slot.put(torch.full((16,), value)) is not None


def test_arena_is_one_allocation_of_distinct_regions() -> None:
    pages = HostPages(torch.device("cpu"))
    pages.hold(256)
    arena = HostArena(pages, range(64, 256))
    regions = [arena.acquire(64) for _ in range(3)]
    assert arena.acquire(1) is None
    assert (arena.buffers_in_use, arena.bytes_in_use) == (3, 192)
    addresses = [region.data_ptr() for region in regions if region is not None]
    assert addresses == [addresses[0] + n * 64 for n in range(3)]
    assert len({region.untyped_storage().data_ptr() for region in regions if region is not None}) == 1
    assert regions[1] is not None
    arena.release(regions[1])
    assert arena.acquire(65) is None
    again = [arena.acquire(40), arena.acquire(24)]
    assert [region.data_ptr() - addresses[1] for region in again if region is not None] == [0, 40]
    assert arena.bytes_in_use == 192


def test_bytes_arrive_on_the_host_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PIECE_BYTES", 100)
    memory = make_memory(slots=1, size=256, test_mode=TestMode(seed=1, longest_delay_seconds=0.002))
    slot = memory.lease(0, swap=True)
    values = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    assert slot.put(values) is not None
    memory.offload(slot)
    share = slot.shares["host"]
    assert isinstance(share.room, HostBuffer)
    pieces = share.room.pieces
    assert [stop for stop, _ in pieces] == [100, 200, 256] and share.left is pieces[-1][1]
    first = share.room.range(0, 64)
    assert first.written is pieces[0][1] and share.room.range(64, 37).written is pieces[1][1]
    assert first.written is not None and first.memory is not None
    first.written.synchronize()
    assert torch.equal(first.memory, values[:64].cpu())
    memory.release(slot)
    memory.close()


def test_calls_two_apart_share_a_rounding_buffer() -> None:
    memory = make_memory()
    buffers, slots = [], []
    for call in range(4):
        slot = memory.lease(call, swap=True)
        fill(slot, float(call))
        buffers.append(slot.buffer.data_ptr())
        memory.offload(slot)
        slots.append(slot)
    assert buffers[0] == buffers[2] != buffers[1] == buffers[3]
    assert memory.stats.unplanned_slots == 0
    assert memory.stats.peak_host_bytes == memory.host.arena.size_bytes
    memory.close()


def test_eviction_waits_for_the_offload() -> None:
    memory = make_memory(test_mode=TestMode(0, 0.05))
    first = memory.lease(0, swap=True)
    fill(first, 7.0)
    memory.offload(first)
    second = memory.lease(2, swap=True)  # poisons the buffer, if the copy had not ended
    assert first.buffer is None and second.buffer is not None
    room = first.shares["host"].room
    assert isinstance(room, HostBuffer) and torch.equal(room.memory.view(torch.float32), torch.full((16,), 7.0))
    memory.close()


def test_slot_comes_back() -> None:
    memory = make_memory(test_mode=TestMode(0, 0.02))
    first = memory.lease(0, swap=True)
    place = first.put(torch.arange(16.0))
    assert place is not None
    memory.offload(first)
    second = memory.lease(2, swap=False)
    memory.fetch(first, 0, ahead=True)
    assert first.buffer is None  # the buffer is taken: ahead of need, nobody is thrown out
    memory.release(second)
    memory.fetch(first, 0, ahead=True)
    assert torch.equal(first.load(place).cpu(), torch.arange(16.0))
    assert memory.offloaded_bytes == memory.fetched_bytes == 64
    memory.release(first)
    assert memory.slots_in_use == 0
    with pytest.raises(RuntimeError, match="are gone"):
        first.load(place)
    memory.release(first)
    assert memory.slots_in_use == 0
    memory.close()


@pytest.mark.parametrize("why", ["stays", "not_offloaded", "in_backward", "partly_offloaded"])
def test_busy_buffer_is_left_alone(why: str) -> None:
    memory = make_memory(size=128)
    first = memory.lease(0, swap=why != "stays")
    fill(first, 7.0)
    if why != "not_offloaded":
        memory.offload(first)
    if why == "partly_offloaded":
        fill(first, 8.0)
    first.in_backward = why == "in_backward"
    second = memory.lease(2, swap=True)
    fill(second, 9.0)
    assert memory.stats.unplanned_slots == 1
    assert first.buffer is not None and second.buffer is not None
    assert float(first.buffer.view(torch.float32)[0]) == 7.0
    memory.release(second)
    memory.release(first)
    assert memory.slots_in_use == 0
    memory.close()


def test_exhausted_arena_leaves_slots_on_the_device() -> None:
    memory = make_memory(slots=1)
    slots = []
    for call in range(4):
        slots.append(memory.lease(call, swap=True))
        fill(slots[-1], float(call))
        memory.offload(slots[-1])
    assert [slot.shares["host"].room is None for slot in slots] == [False, True, True, True]
    assert memory.stats.unplanned_slots == 1  # call 3: call 1 cannot leave the buffer
    for call in (3, 2, 1, 0):
        slot = slots[call]
        memory.fetch(slot, call)
        if slot.fetch is not None:
            slot.fetch.wait()
        assert slot.buffer is not None and float(slot.buffer.view(torch.float32)[0]) == call
        memory.release(slot)
    assert memory.slots_in_use == 0
    memory.close()


# ---- copies.py


class Gate:
    """An event that the test opens."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def synchronize(self) -> None:
        self._open.wait()

    def open(self) -> None:
        self._open.set()


def test_copies_run_in_order_and_after_what_they_wait_for() -> None:
    stream, gate = ThreadCopyStream("test"), Gate()
    a, b, c = torch.ones(1000), torch.zeros(1000), torch.zeros(1000)
    stream.copy(b, a, gate)
    last = stream.copy(c, b)
    assert float(b.sum()) == float(c.sum()) == 0  # the first waits at the gate, the second behind it
    gate.open()
    last.wait()
    assert float(c.sum()) == 1000
    stream.close()


def test_failed_copy_is_reported_to_whoever_waits() -> None:
    class Broken:
        def synchronize(self) -> None:
            raise OSError("broken cable")

    stream = ThreadCopyStream("test")
    a, b = torch.ones(4), torch.zeros(4)
    failed = stream.copy(b, a, Broken())
    follower = stream.copy(a, b, failed)
    with pytest.raises(RuntimeError, match="copy between device and host failed: broken cable"):
        failed.wait()
    with pytest.raises(RuntimeError, match="failed"):
        follower.wait()
    assert float(b.sum()) == 0
    stream.copy(b, a).wait()
    assert torch.equal(a, b)
    stream.close()


def test_idle_stream_holds_no_tensor() -> None:
    threads = threading.active_count()
    stream = ThreadCopyStream("test")
    a, b = torch.ones(4), torch.zeros(4)
    stream.copy(b, a).wait()
    stream.copy(torch.zeros(1), torch.zeros(1)).wait()
    storage = torch.multiprocessing.reductions.StorageWeakRef(a.untyped_storage())
    del a
    assert storage.expired()
    stream.close()
    assert threading.active_count() == threads


def test_synchronize_waits_for_all() -> None:
    stream = ThreadCopyStream("test")
    stream.synchronize()
    targets = [torch.zeros(10_000) for _ in range(20)]
    for t in targets:
        stream.copy(t, torch.ones(10_000))
    stream.synchronize()
    assert all(float(t.sum()) == 10_000 for t in targets)
    stream.close()


# ---- intercept.py


def answer_with_values(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    return v


@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("token_dim", [0, 1])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "drop",
    [F.dropout, torch.dropout, nn.Dropout(0.4), nn.Dropout(0.4, inplace=True)],
    ids=["functional", "torch", "module", "inplace"],  # addresses in names would differ between workers
)
def test_dropout_of_parts_is_that_of_the_whole(drop: object, batch: int, token_dim: int, transposed: bool) -> None:
    tokens, hidden = 21, 8
    shape = (batch, tokens, hidden) if token_dim == 1 else (tokens, batch, hidden)
    x = torch.randn(shape)
    if transposed:
        x = torch.randn(shape[::-1]).permute(2, 1, 0)

    def apply(t: Tensor) -> Tensor:
        return drop(t) if isinstance(drop, nn.Module) else drop(t, 0.4, True)

    torch.manual_seed(3)
    whole = apply(x.clone())
    state = torch.get_rng_state()
    for start, stop in ((0, 21), (0, 8), (8, 13), (13, 21)):
        torch.manual_seed(3)
        part = x.narrow(token_dim, start, stop - start)
        with handling(answer_with_values, nn.Identity()), LayerMode(tokens, start, stop, batch, token_dim):
            dropped = apply(torch.clone(part, memory_format=torch.preserve_format))
        assert torch.equal(dropped, whole.narrow(token_dim, start, stop - start))
        assert torch.equal(torch.get_rng_state(), state)


def test_dropout_of_flattened_tokens() -> None:
    x = torch.randn(3 * 10, 8)
    torch.manual_seed(3)
    whole = F.dropout(x, 0.4)
    rows = torch.arange(30).view(3, 10)[:, 4:7].flatten()
    torch.manual_seed(3)
    with handling(answer_with_values, nn.Identity()), LayerMode(10, 4, 7, 3, 1):
        assert torch.equal(F.dropout(x[rows], 0.4), whole[rows])


def test_dropout_without_effect_and_dropout_that_cannot_be_cut() -> None:
    x, odd = torch.randn(3, 4, 8), torch.randn(5, 7)
    state = torch.get_rng_state()
    with handling(answer_with_values, nn.Identity()), LayerMode(10, 0, 4, 3, 1):
        assert F.dropout(x, 0.4, training=False) is x
        assert F.dropout(x, 0.0) is x
        assert torch.dropout(x, 0.4, train=False) is x
        with pytest.raises(ValueError, match="cannot be cut by token"):
            F.dropout(odd, 0.4)
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_goes_to_the_handler_however_it_is_called() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    own = F.scaled_dot_product_attention
    calls: list[AttentionSpec] = []

    def handler(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        assert current_handler() is None  # its own attention calls are not caught
        calls.append(spec)
        return own(q, k, v)

    with handling(handler, nn.Identity()), LayerMode(5, 0, 5, 1, 1):
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
        own(q, key=k, value=v, scale=0.5)
        F.scaled_dot_product_attention(q, k, v, None, 0.1)
    assert F.scaled_dot_product_attention is own and current_handler() is None
    assert calls == [AttentionSpec(True), AttentionSpec(False, 0.5), AttentionSpec(False, dropout=0.1)]
    own(q, k, v)
    assert len(calls) == 3


def test_handlers_nest_and_survive_errors() -> None:
    own = F.scaled_dot_product_attention

    def fail_inside(outer: object) -> None:
        with handling(answer_with_values, nn.Identity()):
            assert current_handler() is not outer
            raise IndexError

    with handling(answer_with_values, nn.Identity()):
        outer = current_handler()
        with pytest.raises(IndexError):
            fail_inside(outer)
        assert current_handler() is outer
    assert current_handler() is None and F.scaled_dot_product_attention is own


def test_attention_inputs_under_autocast() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    assert autocast_inputs(q, k, v) == (q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        assert {t.dtype for t in autocast_inputs(q, k, v)} == {torch.bfloat16}


# ---- shared.py


def saved_by(compute: object) -> list[Tensor]:
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        compute()
    return saved


def test_weights_buffers_and_their_views_are_shared() -> None:
    layer = nn.Linear(6, 4)
    layer.register_buffer("table", torch.randn(6))
    x = torch.randn(2, 5, 6, requires_grad=True)
    shared = NonActivations(layer, (), x)
    for t in (layer.weight, layer.weight.t(), layer.weight[1:], layer.weight.detach(), layer.table, layer.table[2:]):
        assert t in shared
    assert layer.weight.float().double() in shared
    assert layer.weight.t().to(torch.bfloat16)[1:] in shared
    assert torch.tensor(1.0) in shared and torch.empty(0) in shared
    assert x not in shared and (x * 2) not in shared and F.linear(x, layer.weight) not in shared
    assert torch.randn(6, 4) not in shared


def test_arguments_are_shared_but_the_input_among_them_is_not() -> None:
    x, table = torch.randn(2, 5, 6), torch.randn(5, 6)
    shared = NonActivations(nn.Linear(6, 4), ((x,), {"table": (table, None)}), x)
    assert table in shared and table.t() in shared
    assert x not in shared and x[:, :2] not in shared


def test_autocast_copies_of_trained_weights_are_shared() -> None:
    layer = nn.Linear(6, 4)
    x = torch.randn(2, 5, 6, requires_grad=True)
    shared = NonActivations(layer, (), x)
    with torch.autocast("cpu", torch.bfloat16):
        saved = saved_by(lambda: layer(x))
        kinds = sorted((tuple(t.shape), t in shared) for t in saved)
    weights = [kind for shape, kind in kinds if shape in ((4, 6), (6, 4))]
    activations = [kind for shape, kind in kinds if shape in ((2, 5, 6), (10, 6))]
    assert weights and all(weights)
    assert not any(activations) and len(weights) + len(activations) == len(kinds)


@pytest.mark.parametrize("joint", [False, True], ids=["auto", "nest"])
@pytest.mark.parametrize("family", ["block", "llama"])
def test_input_of_the_first_layer_is_not_taken_for_a_weight(family: str, joint: bool) -> None:
    """Like a cast of a weight, it is a function of the embedding's weight alone, and so is its fp32 copy in a norm."""
    model, batch = build(family).bfloat16(), make_batch(2, 48)
    with EngineUnderTest(model, joint_attention=joint) as under_test:
        under_test.profile_step(batch)
        assert under_test.profile is not None
        first, *others = ([s.kind for s in call.saved] for call in under_test.profile.in_order())
        assert all(first == other for other in others)
        for slice_tokens in (None, 13):
            predicted = under_test.load(1.0, slice_tokens)
            loss = model(**beside(model, batch)).loss
            assert used_bytes(under_test.engine) == (predicted[0],) * len(predicted)
            del loss
