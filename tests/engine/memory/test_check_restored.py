"""With `check_restored`, a tensor that comes back with other bytes than it left with ends the run in one line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.devices import DEVICE
from support.families import PlainBlock, PlainModel
from support.harness import DELAYS
from support.markers.slow import slow_if
from support.trainer_harness import LanguageModel, assert_usable_again, fit, forwards, loader, make_trainer
from torch import Tensor, nn
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.spill_layout import SpillLayout
from lightning_memo.engine.copies.copy_events import CopyEvent
from lightning_memo.engine.copies.thread_stream import ThreadCopyStream
from lightning_memo.engine.memory import host_arena, slot_memory, spill
from lightning_memo.engine.memory.checksums import Checksum, RestoredError, RowChecksums, TensorLabel
from lightning_memo.engine.memory.lazy_tensor import Assembly
from lightning_memo.engine.memory.slot_memory import SlotMemory

pytestmark = pytest.mark.usefixtures("own_folder")

WHAT = TensorLabel("key", 3, 0, 512)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# ---- sums over bytes


def some_bytes(count: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("count", [1, 7, 8, 9, 4095, 4096, 4097, 12289])
def test_every_single_bit_is_seen(count: int) -> None:
    data = some_bytes(count)
    check = Checksum(WHAT, data, torch.uint8)
    check.compare(torch.cat([data[:3], data])[min(count, 3) :])  # also at an offset that is no multiple of eight
    for byte in {0, count // 2, count - 1}:
        for bit in range(8):
            data[byte] ^= 1 << bit
            with pytest.raises(RestoredError):
                check.compare(data)
            data[byte] ^= 1 << bit
    check.compare(data)


def test_pieces_that_changed_places_are_seen() -> None:
    data = some_bytes(3 * 4096)
    check = Checksum(WHAT, data, torch.uint8)
    with pytest.raises(RestoredError):
        check.compare(torch.cat([data[4096:8192], data[:4096], data[8192:]]))


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_what_left_with_nan_may_come_back_with_it(dtype: torch.dtype) -> None:
    values = torch.ones(600, dtype=dtype)
    values[5], values[7] = float("nan"), float("inf")
    data = values.view(torch.uint8)
    check = Checksum(WHAT, data, dtype)
    check.compare(data.clone())
    values[9:12] = float("nan")
    with pytest.raises(RestoredError) as caught:
        check.compare(data, "the disk")
    line = '"key" of layer 3, tokens 0 to 511, came back from the disk changed: 5 NaN or Inf, 2 when it left.'
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


@pytest.mark.parametrize("features", [3, 4, 6])  # rows of 6, 8 and 12 bytes: other words
def test_rows_are_read_in_any_ranges(features: int) -> None:
    matrix = torch.randn(10, features, dtype=torch.float32).bfloat16()
    checks = RowChecksums("hidden states", 10, features, matrix.dtype, DEVICE)

    def bytes_of(*ranges: range) -> Tensor:
        return torch.cat([matrix[r.start : r.stop] for r in ranges]).view(-1).view(torch.uint8)

    checks.note(4, bytes_of(range(4, 10)))
    checks.note(0, bytes_of(range(4)))
    ranges = [range(6, 9), range(1, 5)]
    checks.compare(ranges, bytes_of(*ranges))
    matrix[3, 0] = float("nan")
    checks.compare([range(3)], bytes_of(range(3)))
    with pytest.raises(RestoredError, match="hidden states, rows 3 to 3, came back from the host changed: 1 NaN"):
        checks.compare(ranges, bytes_of(*ranges))


def test_hidden_states_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    slots = SlotMemory(64, 4096, DEVICE, test_mode=DELAYS, state_bytes=4096, check_restored=True)
    whole = torch.randn(1, 8, 4)
    assembly = Assembly(whole.shape, whole.dtype, DEVICE, 4, slots, '"output" of layer 1')
    for start in (4, 0):
        assembly.write(1, start, whole[:, start : start + 4])
    lazy = assembly.take()
    assert torch.equal(lazy.fetch_part(1, 2, 7)(), whole[:, 2:7])
    calls.arenas[-1][5 * 16] ^= 1
    assert torch.equal(lazy.fetch_part(1, 0, 5)(), whole[:, :5])
    with pytest.raises(RestoredError, match='"output" of layer 1, rows 5 to 5'):
        lazy.fetch_part(1, 4, 8)()
    slots.close()


# ---- training


def eight_blocks() -> nn.Module:
    return PlainModel([PlainBlock(dropout=0.2) for _ in range(8)])


SLICES = {"alpha": 0.5, "slice_tokens": 8}
PATHS = {
    "swapped": ("block_dropout", {"alpha": 1.0}),
    "sliced": ("block_dropout", {**SLICES, "host_backed": "none"}),
    "nested": ("block_dropout", {"alpha": 0.5, "schedule": "nest"}),
    "spilled": (eight_blocks, {"alpha": 1.0, "spill_path": "disk"}),
    "kinds": ("llama_gqa", {"storage": "kinds", "device_memory": "1.18MiB", "host_memory": "100KiB"}),
    "attention": ("llama_gqa", {**SLICES, "host_backed": "attention"}),
    "all": ("llama_gqa", {**SLICES, "host_backed": "all"}),
    "slice": ("llama_gqa", {**SLICES, "schedule": "slice"}),
}


def strategy_of(path: str, **settings: Any) -> MemoStrategy:
    """The strategy of a path; if it spills, the host memory holds two slots."""
    if path == "spilled":
        Path("disk").mkdir(exist_ok=True)
        slot_bytes = fit(MemoStrategy(alpha=1.0), LanguageModel(eight_blocks), max_steps=1).plan.swap.slot_bytes
        settings["host_memory"] = 2 * slot_bytes + SpillLayout(slot_bytes).bounce_bytes
    return MemoStrategy(**PATHS[path][1] | settings)


@slow_if(lambda path: path not in ("swapped", "all"))
@pytest.mark.parametrize("path", PATHS)
def test_a_clean_run_is_the_same(path: str) -> None:
    """Results are bit-identical in spite of delays and poison, which are never compared."""
    settings: dict[str, Any] = {}
    if path == "kinds":  # its plan depends on measured times, so another profile may give another plan
        fit(strategy_of(path), LanguageModel(PATHS[path][0]), max_steps=1).plan.save("plan.json")
        settings["plan"] = "plan.json"
    expected = fit(strategy_of(path, **settings), LanguageModel(PATHS[path][0]), max_steps=3)
    settings |= {"check_restored": True, "test_mode": DELAYS}
    actual = fit(strategy_of(path, **settings), LanguageModel(PATHS[path][0]), max_steps=3)
    assert actual.plan.swap == expected.plan.swap
    assert actual.losses == expected.losses
    weights = expected.module.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in actual.module.state_dict().items())


# Whether to damage the source of a copy to the device, given the call that starts the copy.
IsMeant = Callable[["Calls", Tensor], bool]


class Calls:
    """The public calls of the slot memory that are running, and the host arenas of the plan in force."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.running: list[str] = []
        self.arenas: list[Tensor] = []
        for name in ("fetch", "copy_from_host"):
            monkeypatch.setattr(SlotMemory, name, self._noting(name, getattr(SlotMemory, name)))
        allocate = host_arena.host_memory

        def host_memory(size_bytes: int, pinned: bool) -> Any:
            pages, lock = allocate(size_bytes, pinned)
            self.arenas.append(pages)
            return pages, lock

        monkeypatch.setattr(host_arena, "host_memory", host_memory)

    def _noting(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **settings: Any) -> Any:
            self.running.append(name)
            try:
                return method(*arguments, **settings)
            finally:
                self.running.pop()

        return call

    def arena_of(self, source: Tensor) -> str:
        """The host arena that a tensor lies in; a slot memory allocates its arenas in this order."""
        for name, pages in zip(("slots", "gradients", "states"), self.arenas[-3:], strict=True):
            if pages.nbytes and source.untyped_storage().data_ptr() == pages.untyped_storage().data_ptr():
                return name
        return ""


def from_a_slot(calls: Calls, source: Tensor) -> bool:
    return calls.running == ["fetch"]


def in_a_block(calls: Calls, source: Tensor) -> bool:
    return not calls.running and calls.arena_of(source) == "slots"


def from_the_gradients(calls: Calls, source: Tensor) -> bool:
    return calls.arena_of(source) == "gradients"


def from_the_states(calls: Calls, source: Tensor) -> bool:
    return calls.arena_of(source) == "states"


def from_elsewhere(calls: Calls, source: Tensor) -> bool:
    return calls.running == ["copy_from_host"] and calls.arena_of(source) == "slots"


def from_the_disk(calls: Calls, source: Tensor) -> bool:
    return True


class Damage:
    """Changes bytes of the host once, before they are copied to the device, in the backward of the second batch.

    Args:
        calls: Running calls of the slot memory.
        stream: Name of the stream that copies them.
        is_meant: Whether it is this copy.
        nan: Whether a value becomes NaN, rather than that one bit changes.

    Attributes:
        armed: Whether the next copy that is meant gets damaged.
    """

    def __init__(self, calls: Calls, stream: str, is_meant: IsMeant, nan: bool) -> None:
        self._calls, self._stream, self._is_meant, self._nan = calls, stream, is_meant, nan
        self.armed = False

    def make_copy_stream(self, device: torch.device, name: str, *settings: Any) -> ThreadCopyStream:
        return DamagingStream(self, name, *settings) if name == self._stream else ThreadCopyStream(name, *settings)

    def before(self, source: Tensor, after: tuple[CopyEvent | None, ...]) -> None:
        if not self.armed or not self._is_meant(self._calls, source):
            return
        for event in after:
            if event is not None:
                event.synchronize()
        self.armed = False
        if self._nan:
            source[:4] = 0xFF
        else:
            source[0] ^= 1


class DamagingStream(ThreadCopyStream):
    def __init__(self, damage: Damage, *settings: Any) -> None:
        super().__init__(*settings)
        self._damage = damage

    @override
    def copy_after(
        self, destination: Tensor, source: Tensor, *after: CopyEvent | None, subject: Any = None
    ) -> CopyEvent:
        self._damage.before(source, after)
        return super().copy_after(destination, source, *after, subject=subject)


class Damaged(LanguageModel):
    """Damage is done in the backward of its second batch: the first is profiled."""

    def __init__(self, family: Any, damage: Damage) -> None:
        super().__init__(family)
        self._damage = damage

    @override
    def on_before_backward(self, loss: Tensor) -> None:
        if len(self.losses) == 2:
            self._damage.armed = True


@pytest.fixture
def damage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Damage]]:
    calls = Calls(monkeypatch)

    def do(*settings: Any) -> Damage:
        made = Damage(calls, *settings)
        for module in (slot_memory, spill):
            monkeypatch.setattr(module, "make_copy_stream", made.make_copy_stream)
        return made

    yield do
    monkeypatch.undo()


@slow_if(lambda case_id: case_id not in ("swapped-bit", "block-bit", "slice-slot-bit"))
@pytest.mark.parametrize("nan", [False, True], ids=["bit", "nan"])
@pytest.mark.parametrize(
    ("path", "stream", "is_meant", "told"),
    [
        ("swapped", "prefetch", from_a_slot, '"input" of layer 1, tokens 0 to 31, came back from the host'),
        ("spilled", "unspill", from_the_disk, '"input" of layer [0-5], tokens 0 to 31, came back from the disk'),
        (
            "kinds",
            "prefetch",
            from_a_slot,
            '"[a-z._]+" of layer [0-9], tokens [0-9]+ to [0-9]+, came back from the host',
        ),
        ("attention", "prefetch", from_a_slot, '"input" of layer 3, tokens 8 to 15, came back from the host'),
        ("attention", "prefetch", in_a_block, '"key" of layer [0-9], tokens 0 to 7, came back from the host'),
        (
            "all",
            "prefetch",
            from_the_gradients,
            '"key gradient" of layer [0-9], tokens 16 to 23, came back from the host',
        ),
        ("all", "prefetch", from_the_states, '"output" of layer [0-9], rows [0-9]+ to [0-9]+, came back from the host'),
        ("slice", "prefetch", from_a_slot, '"input" of layer [0-9], tokens 24 to 31, came back from the host'),
        ("slice", "prefetch", from_elsewhere, '"shared", tokens 16 to 23, came back from the host'),
    ],
    ids=["swapped", "spilled", "kinds", "slice-slot", "block", "gradients", "states", "sequence-slot", "arguments"],
)
def test_damage_is_told(
    damage: Callable[..., Damage], path: str, stream: str, is_meant: IsMeant, told: str, nan: bool, monkeypatch: Any
) -> None:
    """The run ends with one line, and the process goes on."""
    module = Damaged(PATHS[path][0], damage(stream, is_meant, nan))
    trainer = make_trainer(strategy_of(path, check_restored=True))
    with pytest.raises(RestoredError, match=f"^{told} changed: {int(nan)} NaN or Inf, 0 when it left. ") as caught:
        trainer.fit(module, loader())
    assert "\n" not in str(caught.value)
    assert len(module.losses) == 2
    assert forwards(module) == []
    del caught
    monkeypatch.undo()
    assert_usable_again()


def test_without_the_switch_damage_goes_on(damage: Callable[..., Damage]) -> None:
    module = Damaged("block_dropout", damage("prefetch", from_a_slot, True))
    assert [math.isnan(loss) for loss in fit(strategy_of("swapped"), module, max_steps=3).losses] == [
        False,
        False,
        True,
    ]
