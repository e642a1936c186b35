"""On a GPU, a step must not make the host wait nor depend on the thread of the backward: tests on the CPU."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.families import make_batch
from support.harness import EngineUnderTest, assert_equal, gradients_of, loss_and_gradients
from support.markers.slow import slow_if
from support.samples.streamed import build
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_memo.engine.copy_streams import CopyEvent, CopyStream, CudaCopyStream, make_copy_stream
from lightning_memo.engine.memory import slot_memory as memory
from lightning_memo.engine.timeline_recorder import TimelineRecorder
from lightning_memo.loss.attach_loss import attach_chunked_loss
from lightning_memo.parallel.batches.token_layout import right_padded_lengths

aten = torch.ops.aten
# On a GPU each of these makes the host wait for the device: their results, or the sizes of those, are needed there.
_WAITING = {
    aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select, aten._unique2,
    aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave, aten.bincount,
}  # fmt: skip
WAYS = {
    "alpha 0": ("llama_gqa", 0.0, None, "none", False),
    "alpha 0.5": ("llama", 0.5, None, "none", False),
    "alpha 1": ("llama_gqa", 1.0, None, "none", False),
    "dropout": ("gpt2_dropout", 0.5, 13, "none", False),
    "nested": ("gpt2_dropout", 0.5, None, "none", True),
    "streamed": ("mistral_window", 0.4, 8, "attention", False),
    "all on the host": ("llama_gqa", 0.4, 8, "hidden", False),
    "slice by slice": ("llama_gqa", 0.4, 8, "model", False),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())


def planned(way: Any) -> tuple[EngineUnderTest, dict[str, Tensor]]:
    family, _, slice_tokens, stream_from_host, joint = way
    settings = {"stream_from_host": stream_from_host, "joint_attention": joint, "check_slices": False}
    return EngineUnderTest(build(family), None, slice_tokens, **settings), make_batch(2, 61)


class HostWaits(TorchDispatchMode):
    """Records operations that would make the host wait for a GPU, while `inside` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Random states are on the host whatever the device. No index is a mask, whose entries would be counted.
        on_host = args and isinstance(args[0], Tensor) and args[0].dtype == torch.uint8
        masks = func.overloadpacket in (aten.index, aten.index_put_) and any(
            isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
        )
        if self.inside and ((func.overloadpacket in _WAITING and not on_host) or masks):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))

    def mark(self, key: int, name: str) -> None:
        """Layers run from the forward of the first layer to the end of its backward."""
        if key == 0:
            self.inside = name != "backward_end"


class Watched:
    """A copy event, or a stream: whoever computes may wait for it, which a GPU's host does not, but not synchronize."""

    def __init__(self, watched: CopyEvent | CopyStream, waits: list[str]) -> None:
        self._watched, self._waits = watched, waits

    def synchronize(self) -> None:
        if threading.current_thread().name not in ("offload", "prefetch"):
            self._waits.append(f"{type(self._watched).__name__}.synchronize")
        self._watched.synchronize()

    def copy(self, *arguments: Any, **subject: Any) -> CopyEvent:
        return Watched(self._watched.copy(*arguments, **subject), self._waits)  # type: ignore[return-value,union-attr]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._watched, name)


@slow_if(lambda case_id: case_id in ("slice by slice", "all on the host"))
@each_way
def test_the_host_waits_for_nothing_within_the_layers(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    monkeypatch.setattr(memory, "make_copy_stream", lambda *a: Watched(make_copy_stream(*a), waits))
    under_test, batch = planned(way)
    attach_chunked_loss(under_test.model, chunk_tokens=8)
    with under_test:
        under_test.profile_step(batch)
        under_test.load(way[1], way[2])
        under_test.step(batch)  # in which recomputed values are compared with the forward's
        waits.clear()
        with HostWaits() as mode:
            under_test.engine.on_mark = mode.mark
            under_test.step(batch)
        assert not mode.inside
        assert mode.found == []
        assert waits == []
        # The check would find them.
        with mode:
            mode.inside = True
            torch.ones(3).sum().item()
            torch.ones(3)[torch.ones(3) > 0]
        assert [name.split(".")[1] for name in mode.found] == ["_local_scalar_dense", "index"]
        under_test.engine.memory.abandon()  # type: ignore[union-attr]
        assert waits == ["ThreadCopyStream.synchronize"] * 2


@slow_if(lambda case_id: case_id in ("slice by slice", "all on the host"))
@each_way
def test_the_backward_runs_in_any_thread(way: Any) -> None:
    """Like autograd's own thread for a GPU, which has no context variables of the forward's thread."""
    under_test, batch = planned(way)
    with under_test:
        under_test.profile_step(batch)
        under_test.load(way[1], way[2])
        expected = under_test.step(batch)
        model = under_test.model
        model.zero_grad()
        torch.manual_seed(5)
        loss = model(**batch).loss
        in_new_thread(loss.backward)
        assert_equal(expected._replace(gradients=gradients_of(model)), expected)
        under_test.assert_empty()


def in_new_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # raised below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_autocast_too_does_not_depend_on_the_thread() -> None:
    under_test, batch = planned(WAYS["alpha 0.5"])
    with under_test:
        under_test.profile_step(batch, amp=True)
        under_test.load(0.5)
        expected = under_test.step(batch, amp=True)
        again = loss_and_gradients(under_test.model, batch, amp=True)
        assert_equal(again, expected)
        under_test.model.zero_grad()
        torch.manual_seed(5)
        with torch.autocast("cpu", torch.bfloat16):
            loss = under_test.model(**batch).loss
        in_new_thread(loss.backward)
        assert_equal(expected._replace(gradients=gradients_of(under_test.model)), expected)


def test_lengths_of_a_padded_batch_take_one_wait() -> None:
    mask = (torch.arange(6) < torch.tensor([[6], [2]])).long()
    with HostWaits() as mode:
        mode.inside = True
        assert right_padded_lengths(mask) == (6, 2)
        assert right_padded_lengths(torch.ones(2, 6)) is None
        for wrong in (mask.flip(1), mask * torch.tensor([[1], [0]])):
            with pytest.raises(ValueError, match="padding that is not on the right, or a row without valid tokens"):
                right_padded_lengths(wrong)
    assert set(mode.found) <= {"aten._local_scalar_dense.default"}


# ---- the CUDA stream's own code, on a stub of CUDA's streams and events whose copies end at once


class StubEvent:
    """Stands for `torch.cuda.Event`."""

    synchronized = 0

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.timed, self.seconds = enable_timing, 0.0

    def record(self, stream: StubStream) -> None:
        assert isinstance(stream, StubStream)
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        assert self.seconds
        StubEvent.synchronized += 1

    def elapsed_time(self, end: StubEvent) -> float:
        assert self.timed and end.timed and self.seconds and end.seconds
        return 1e3 * (end.seconds - self.seconds)


class StubStream:
    """Stands for `torch.cuda.Stream`; `current` is the stream that work goes to."""

    compute: StubStream
    current: StubStream

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.priority, self.waited = priority, 0

    def wait_event(self, event: StubEvent) -> None:
        assert event.seconds, "a wait for an event that was not recorded yet waits for nothing"
        self.waited += 1

    def synchronize(self) -> None:
        StubEvent.synchronized += 1

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        before, StubStream.current = StubStream.current, self
        yield
        StubStream.current = before


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[StubEvent]:
    StubStream.compute = StubStream.current = StubStream()
    StubEvent.synchronized = 0
    monkeypatch.setattr(torch.cuda, "Event", StubEvent)
    monkeypatch.setattr(torch.cuda, "Stream", StubStream)
    monkeypatch.setattr(torch.cuda, "stream", StubStream.as_current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: StubStream.current)
    return StubEvent


@pytest.mark.slow
@each_way
def test_streams_of_cuda_wait_among_themselves(
    way: Any, stub: type[StubEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    streams: dict[str, CudaCopyStream] = {}

    def make(device: torch.device, name: str, *arguments: Any) -> CudaCopyStream:
        streams[name] = CudaCopyStream(torch.device("cuda", 0), name, *arguments)
        return streams[name]

    under_test, batch = planned(way)
    with under_test:
        under_test.profile_step(batch)
        under_test.load(way[1], way[2])
        expected = under_test.step(batch)
    monkeypatch.setattr(memory, "make_copy_stream", make)
    with under_test:
        recorder = under_test.engine.recorder = TimelineRecorder(torch.device("cuda", 0))
        under_test.load(way[1], way[2])
        assert_equal(under_test.step(batch), expected)
        recorder.start()
        assert_equal(under_test.step(batch), expected)
        assert stub.synchronized == 0
        timeline = recorder.stop()
        assert stub.synchronized > 0
        for name in ("offload", "prefetch"):
            copies = [span for span in timeline.spans if span.lane == name]
            stream = streams[name]._stream
            assert stream.priority < 0
            assert stream.waited >= 2 * len(copies) > 0  # each for what was computed before, in both steps
            assert timeline.waited_seconds[name] >= 0
        assert StubStream.compute.waited > 0
