"""Slices with slots of their own, and keys and values on the host: gradients, bytes, and fetched blocks."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from lightning.pytorch.strategies import ModelParallelStrategy
from support.devices import DEVICE
from support.families import make_batch
from support.harness import DELAYS, EngineUnderTest, Step, in_double, loss_and_gradients
from support.markers.slow import slow_if
from support.samples.streamed import build, frozen_below
from support.trainer_harness import LanguageModel, fit, plain, shorten_measurements
from torch import Tensor, nn
from transformers.models.llama import modeling_llama

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.swap_plan import StreamFromHost
from lightning_memo.engine import Engine
from lightning_memo.engine.attention.sliced_attention import StreamedAttention
from lightning_memo.engine.copy_streams import CopyEvent, ThreadCopyStream
from lightning_memo.engine.memory import host
from lightning_memo.engine.memory.block_reader import BlockReader, token_rows
from lightning_memo.engine.memory.offloaded_tensor import OffloadedTensor
from lightning_memo.engine.saved_tensors.offload_group import KeysValues, OffloadGroups
from lightning_memo.engine.sliced_model.sliced_model import SlicedForward
from lightning_memo.engine.timeline_recorder import Subject
from lightning_memo.kernels import AttentionResult, AttentionSpec
from lightning_memo.kernels.cpu_flash import CpuFlash
from lightning_memo.loss.attach_loss import attach_chunked_loss
from lightning_memo.planner.token_slices import RECOMPUTED, TokenRange
from lightning_memo.profiler.memory_meter import PeakMeter

# Farthest from fp64, in units of plain training's distance: every slice rounds each weight gradient again.
FARTHER = 1.25


def assert_as_good(model: nn.Module, batch, actual: Step, plain: Step) -> None:
    torch.testing.assert_close(actual.loss, plain.loss, rtol=1e-6, atol=0)
    if actual.distance(plain) > 1e-6:
        exact = loss_and_gradients(in_double(model), batch)
        assert actual.distance(exact) <= FARTHER * plain.distance(exact)


WAYS = [
    (4, "attention", 1),
    (8, "hidden", 1),
    (11, "hidden", 14),
    (11, "attention", 61),
]  # the last of 11 has one token


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "slices", "stream_from_host", "block_tokens"),
    [
        *(("llama_gqa", *way) for way in WAYS),
        *(("llama", *way) for way in WAYS[1:3]),
        *(("mistral_window", *way) for way in WAYS[:2]),
        *(("block_dropout", *way) for way in WAYS[::2]),
        ("llama_lora", *WAYS[1]),
        ("mixtral", *WAYS[2]),
    ],
)
def test_gradients(
    family: str, slices: int, stream_from_host: StreamFromHost, block_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stream_from_host == "attention":  # attention waits for a part of what a slice copies
        monkeypatch.setattr(host, "PIECE_BYTES", 1000)
    model, batch = build(family), make_batch(2, 61)
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model, slice_tokens=-(-61 // slices), stream_from_host=stream_from_host) as under_test:
        under_test.engine.attention.block_tokens = block_tokens
        assert_as_good(model, batch, under_test.profile_step(batch), plain)
        for alpha in (0.0, 0.4, 1.0):
            predicted = under_test.load(alpha)
            assert_as_good(model, batch, under_test.step(batch), plain)
            under_test.assert_as_planned()
            memory = under_test.engine.memory
            assert memory is not None and memory.stats.peak_host_bytes <= memory.host_bytes
            if family != "mixtral":  # what its experts of a slice get is known on the average only
                assert memory.stats.peak_host_bytes >= sum(predicted)


@slow_if(lambda family: family != "llama_lora")
@pytest.mark.parametrize(
    ("family", "slices"),
    [("llama", 4), ("llama_gqa", 11), ("gemma3_mixed_windows", 4), ("gpt_neox", 8), ("llama_lora", 11)],
)
def test_gradients_of_the_whole_model_slice_by_slice(family: str, slices: int) -> None:
    model, batch = build(family), make_batch(2, 61, padded=True)
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model, slice_tokens=-(-61 // slices), stream_from_host="model") as under_test:
        under_test.engine.attention.block_tokens = 16
        assert_as_good(model, batch, under_test.profile_step(batch), plain)
        for alpha in (0.0, 0.4, 1.0):
            under_test.load(alpha)
            assert_as_good(model, batch, under_test.step(batch), plain)
            if family != "gemma3_mixed_windows":  # saves some small tensors in a slice of 8 tokens that others share
                under_test.assert_as_planned()


def test_layers_get_real_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of other libraries read memory by its address. All tokens are probed if they make two slices."""
    own, seen = modeling_llama.apply_rotary_pos_emb, []  # number of tokens, whether lazy

    def note(q: Tensor, k: Tensor, *tables: Tensor, **kwargs: Any) -> Any:
        seen.extend((t.shape[-2], isinstance(t, OffloadedTensor)) for t in tables)
        return own(q, k, *tables, **kwargs)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", note)
    with EngineUnderTest(build("llama"), slice_tokens=8, stream_from_host="hidden") as under_test:
        under_test.profile_step(make_batch(1, 12))
    assert 12 in {tokens for tokens, _ in seen}
    assert not any(lazy for _, lazy in seen)


def test_a_batch_without_labels_slice_by_slice() -> None:
    """The loss is NaN and the gradient zero, as in plain training."""
    model, batch = build("llama"), make_batch(2, 61)
    batch["labels"].fill_(-100)
    plain = loss_and_gradients(model, batch)
    assert plain.loss.isnan() and plain.norm() == 0
    with EngineUnderTest(model, slice_tokens=16, stream_from_host="model") as under_test:
        actual = under_test.profile_step(batch)
    assert actual.loss.isnan() and actual.norm() == 0


@pytest.mark.slow
def test_frozen_layers_slice_by_slice() -> None:
    model, batch = frozen_below(build("llama_gqa")), make_batch(2, 61)
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model, slice_tokens=8, stream_from_host="model") as under_test:
        assert_as_good(model, batch, under_test.profile_step(batch), plain)
        under_test.load(0.5)
        assert_as_good(model, batch, under_test.step(batch), plain)


@pytest.mark.slow
@pytest.mark.parametrize("stream_from_host", ["hidden", "model"])
def test_what_an_interrupted_step_holds_goes_back(
    stream_from_host: StreamFromHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = build("llama"), make_batch(1, 61)
    with EngineUnderTest(model, slice_tokens=16, stream_from_host=stream_from_host) as under_test:
        under_test.profile_step(batch)
        under_test.load(0.5)
        model(**batch).loss  # noqa: B018  its graph is dropped
        gc.collect()
        under_test.assert_empty()
        backward, calls = StreamedAttention.backward, iter(range(100))

        def fail(attention: StreamedAttention, *args: Any) -> Any:
            if next(calls) == 5:
                raise RuntimeError("on purpose")
            return backward(attention, *args)

        monkeypatch.setattr(StreamedAttention, "backward", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(**batch).loss.backward()
        monkeypatch.undo()
        for _ in range(2):
            loss_and_gradients(model, batch)
            under_test.assert_empty()
            under_test.assert_as_planned()


def test_longer_batches_after_one_without_slices_are_profiled() -> None:
    model = build("llama")
    with EngineUnderTest(model, slice_tokens=16, stream_from_host="attention") as under_test:
        under_test.profile_step(make_batch(8, 8))
        swap = under_test.engine.swap
        assert swap is not None and not swap.streamed
        under_test.step(make_batch(1, 61))
        swap = under_test.engine.swap
        assert swap is not None and swap.streamed


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("mixtral", {"output_router_logits": True}, "auxiliary loss"),
        ("llama", {"labels": None}, "got no labels"),
        ("llama", {"pixel_values": torch.zeros(2, 3, 8, 8)}, r"got pixel_values \[2, 3, 8, 8\], which does not have"),
        ("llama", {"position_ids": torch.zeros(3, 2, 61)}, r"got position_ids \[3, 2, 61\]"),
        ("llama", {"input_ids": None, "inputs_embeds": torch.zeros(2, 61, 32, requires_grad=True)}, "inputs_embeds"),
        ("llama", {"labels": torch.zeros(2, 122, dtype=torch.long)}, r"got labels \[2, 122\], which does not have one"),
        (
            "llama",
            {"labels": torch.zeros(2, 8, dtype=torch.long)},
            r'stream_from_host="model" takes labels \[2, 61\]; use',
        ),
        ("llama", {"labels": torch.zeros(1, 61, dtype=torch.long)}, r"got labels \[1, 61\]"),
        ("llama", {"shift_labels": torch.zeros(2, 30, dtype=torch.long)}, r"got shift_labels \[2, 30\]"),
        ("llama", {"position_ids": torch.arange(8)[None]}, r"got position_ids \[1, 8\]"),
        ("llama", {"position_ids": torch.arange(61)}, r"got position_ids \[61\]"),
        ("llama", {"attention_mask": torch.ones(2, 8)}, r"got attention_mask \[2, 8\]"),
        ("llama", {"token_type_ids": torch.zeros(2, 8, dtype=torch.long)}, r"got token_type_ids \[2, 8\]"),
        (
            "llama",
            {"input_ids": torch.zeros(61, dtype=torch.long)},
            r"takes input_ids \[batch, tokens\], but .* \[61\]",
        ),
        (
            "llama",
            {"input_ids": None, "inputs_embeds": torch.zeros(61, 32)},
            r"takes inputs_embeds \[batch, tokens, hid",
        ),
    ],
)
def test_what_no_slice_can_compute_is_refused(family: str, arguments: dict[str, Any], message: str) -> None:
    with EngineUnderTest(build(family), slice_tokens=8, stream_from_host="model") as under_test:
        with pytest.raises(ValueError, match=message):
            under_test.model(**make_batch(2, 61) | arguments)
        under_test.assert_empty()


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        {"labels": make_batch(2, 61)["labels"].flatten()},
        {"labels": make_batch(2, 61)["labels"].view(1, -1)},
        {"labels": make_batch(2, 61)["labels"].view(61, 2)},
        {"shift_labels": make_batch(2, 61)["labels"].view(1, -1)},
        {"position_ids": torch.tensor([[3]]), "attention_mask": torch.ones(1, 61)},
    ],
)
def test_inputs_of_other_shapes_that_plain_training_takes(arguments: dict[str, Tensor]) -> None:
    """The loss of transformers flattens labels."""
    model, batch = build("llama"), make_batch(2, 61) | arguments
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model, slice_tokens=8, stream_from_host="model") as under_test:
        assert_as_good(model, batch, under_test.profile_step(batch), plain)


@pytest.mark.slow
def test_a_batch_on_the_host_is_moved_slice_by_slice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    batch = make_batch(2, 61)
    step = SlicedForward(Mock(device=torch.device("meta")), Mock(), batch)
    moved = step.inputs_of(TokenRange(8, 16, RECOMPUTED))
    tensors = {name: (t.device.type, tuple(t.shape)) for name, t in moved.items() if isinstance(t, Tensor)}
    assert {name: of for name, of in tensors.items() if name != "num_items_in_batch"} == dict.fromkeys(
        ("input_ids", "labels", "shift_labels", "attention_mask"), ("meta", (2, 8))
    ) | {"position_ids": ("meta", (1, 8))}
    monkeypatch.chdir(tmp_path)
    shorten_measurements(monkeypatch)
    whole = Mock(side_effect=AssertionError("all of a batch was moved"))
    monkeypatch.setattr(ModelParallelStrategy, "batch_to_device", whole)
    assert fit(MemoStrategy(slice_tokens=7, stream_from_host="model"), LanguageModel("llama"), max_steps=2).losses


class UsesFirstLayer(transformers.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        seen: list[Tensor] = []
        hook = self.model.layers[0].register_forward_hook(lambda *call: seen.append(call[-1]))
        output = super().forward(*args, **kwargs)
        hook.remove()
        if output.loss is not None:
            output.loss = output.loss + seen[0].square().mean()
        return output


class OfOneLength(transformers.LlamaForCausalLM):
    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        if input_ids.shape[1] != 61:
            raise ValueError("only 61 tokens are supported")
        return super().forward(input_ids, **kwargs)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (UsesFirstLayer, "other outputs of its layers than the last one"),
        (OfOneLength, "ended with: only 61 tokens are supported: use stream_from_host"),
    ],
)
def test_forwards_that_no_slice_can_run_are_refused(kind: type[nn.Module], message: str) -> None:
    model = kind(build("llama").config)
    with (
        EngineUnderTest(model, slice_tokens=8, stream_from_host="model") as under_test,
        pytest.raises(ValueError, match=message),
    ):
        under_test.model(**make_batch(2, 61))


@pytest.mark.slow
def test_two_forwards_slice_by_slice_are_refused() -> None:
    with EngineUnderTest(build("llama"), slice_tokens=8, stream_from_host="model") as under_test:
        first = under_test.model(**make_batch(2, 61)).loss
        with pytest.raises(ValueError, match="takes one forward of the model before its backward"):
            under_test.model(**make_batch(2, 61))
        first.backward()
        under_test.assert_empty()


# ---- what is on the device


@slow_if(lambda case_id: case_id != "model-True")
@pytest.mark.filterwarnings("ignore:.*profiler.*")
@pytest.mark.parametrize(("stream_from_host", "amp"), [("hidden", False), ("model", False), ("model", True)])
def test_nothing_on_the_device_grows_with_the_sequence(
    stream_from_host: StreamFromHost, amp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How many of the two rows that may be on their way to the host are alive would hang on how busy the machine is.
    copy = ThreadCopyStream.copy

    def copy_at_once(self: ThreadCopyStream, *arguments: Any, **subject: Any) -> CopyEvent:
        event = copy(self, *arguments, **subject)
        event.wait()
        return event

    monkeypatch.setattr(ThreadCopyStream, "copy", copy_at_once)
    model = build("llama_gqa")
    del model.model.layers[2:]
    detach = attach_chunked_loss(model, 128)
    peaks = {tokens: peak_bytes(model, stream_from_host, tokens, amp) for tokens in (512, 2048)}
    for undo in detach:
        undo()
    # A copy of the ids takes 8 bytes a token. "hidden" also keeps the positions, which layers get, and a copy
    # of them. A table for rotary embedding would be 32 bytes a token, and hidden states 128.
    assert peaks[2048] - peaks[512] <= (12 if stream_from_host == "model" else 28) * 1536, peaks
    assert peaks[2048] <= 1.08 * peaks[512], peaks


def peak_bytes(model: nn.Module, stream_from_host: StreamFromHost, tokens: int, amp: bool) -> int:
    """Peak of a step apart from weights and gradients; the plan is made from a step of two slices."""
    settings = {"slice_tokens": 128, "stream_from_host": stream_from_host, "check_slices": False}
    with EngineUnderTest(model, None, **settings) as under_test:
        under_test.engine.attention.block_tokens = 128
        under_test.profile_step(make_batch(1, 256), amp)
        under_test.load(0.0, tokens=tokens)
        model.zero_grad(set_to_none=False)
        batch = make_batch(1, tokens)
        with PeakMeter(DEVICE) as meter:
            with torch.autocast("cpu", torch.bfloat16, enabled=amp, cache_enabled=False):  # as Lightning enters it
                loss = model(**batch).loss
            loss.backward()
        under_test.assert_as_planned()
        assert under_test.engine.swap is not None
        return meter.peak_bytes + 2 * under_test.engine.swap.memory.slot


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "real", "amp"),
    [
        ("llama_gqa", 0, False),
        ("llama_gqa", 0, True),
        ("llama_frozen", 0, False),
        ("qwen3_moe", 0, False),
        ("gemma3_mixed_windows", 0, False),
        ("gpt2", 2, False),
        ("block", 2, True),
    ],
)
def test_hidden_states_are_on_the_host(family: str, real: int, amp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but `real` of them: embeddings to which positions are added, their gradient, the input of another head."""
    model, batch = build(family), make_batch(2, 61, padded=family == "llama_gqa")
    plain = loss_and_gradients(model, batch, amp)
    detach = attach_chunked_loss(model, 16)
    made_real: dict[int, Tensor] = {}  # by the address of the real tensor, which aliases share
    materialize = OffloadedTensor.materialize

    def noted(lazy: OffloadedTensor) -> Tensor:
        t = materialize(lazy)
        made_real[t.data_ptr()] = t
        return t

    monkeypatch.setattr(OffloadedTensor, "materialize", noted)
    with EngineUnderTest(model, slice_tokens=16, stream_from_host="hidden") as under_test:
        under_test.profile_step(batch, amp)
        under_test.load(0.5)
        made_real.clear()
        step = under_test.step(batch, amp)
        if family != "qwen3_moe":  # what its experts of a slice get is known on the average only
            under_test.assert_as_planned()
    for undo in detach:
        undo()
    assert len(made_real) == real, made_real
    assert step.distance(plain) <= (0.02 if amp else 1.5e-6)


# ---- what is fetched


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_each_slice_fetches_the_earlier_ones_that_it_sees(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cores: list[StreamedAttention] = []
    make = Engine.streamed_attention

    def remember(*args: Any) -> StreamedAttention:
        cores.append(make(*args))
        return cores[-1]

    monkeypatch.setattr(Engine, "streamed_attention", remember)
    with EngineUnderTest(build(family), slice_tokens=8, stream_from_host="hidden") as under_test:
        under_test.engine.attention.block_tokens = 1
        under_test.step(make_batch(2, 61))
        window = 24 if family == "mistral_window" else 61
        seen = sum(8 * j + 8 > 8 * i - window + 1 for i in range(8) for j in range(i))
        assert seen == (28 if family == "llama" else 7 + 6 + 5)
        # Once in the forward, once in the backward, of every layer.
        assert [core.slices_fetched for core in cores] == [2 * seen] * 4


class Timeline:
    """Begins and ends of copies and kernels, in order, recorded by several threads."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, str]] = []
        self._changed = threading.Condition()

    def note(self, what: str, number: int, event: str) -> None:
        with self._changed:
            self.events.append((what, number, event))
            self._changed.notify_all()

    def wait_for(self, what: str, number: int, event: str) -> None:
        with self._changed:
            happened = self._changed.wait_for(lambda: (what, number, event) in self.events, 10.0)
        assert happened, f"{what} {number} has no {event}: {self.events}"


class RecordingStream(ThreadCopyStream):
    """Copies block `n` of keys and of values after kernel call `n` has begun, like a slow copy."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__("prefetch")
        self.timeline, self.copies = timeline, 0

    def copy(
        self, destination: Tensor, source: Tensor, *after: CopyEvent | None, subject: Subject | None = None
    ) -> CopyEvent:
        block, which = divmod(self.copies, 2)
        self.copies += 1
        if which == 0:
            self.timeline.note("copy", block, "issue")
        super().copy(destination, source, *after, Mock(synchronize=lambda: self._begin(block, which)))
        nothing = destination[:0]
        return super().copy(nothing, nothing, Mock(synchronize=lambda: self._end(block, which)))

    def _begin(self, block: int, which: int) -> None:
        self.timeline.wait_for("kernel", block, "begin")
        if which == 0:
            self.timeline.note("copy", block, "begin")

    def _end(self, block: int, which: int) -> None:
        if which == 1:
            self.timeline.note("copy", block, "end")


class RecordingKernel(CpuFlash):
    """Call 0 gets the slice's own keys, call `n` gets block `n - 1`; a call lasts until the next block has arrived."""

    def __init__(self, timeline: Timeline, blocks: int) -> None:
        self.timeline, self.blocks, self.calls = timeline, blocks, 0

    def forward(self, *args: Any) -> AttentionResult:
        with self._recorded():
            return super().forward(*args)

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        with self._recorded():
            return super().backward(*args)

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        call = self.calls
        self.calls += 1
        self.timeline.note("kernel", call, "begin")
        yield
        if call < self.blocks:
            self.timeline.wait_for("copy", call, "end")
        self.timeline.note("kernel", call, "end")


def overlapping(blocks: int) -> list[tuple[str, int, str]]:
    """The timeline of a double buffer: each block is copied during the kernel call before its own, not earlier."""
    events = [("copy", 0, "issue")]
    for n in range(blocks):
        during = [("copy", n, "begin"), ("copy", n, "end")]
        following = [("copy", n + 1, "issue")] if n + 1 < blocks else []
        events += [("kernel", n, "begin"), *during, ("kernel", n, "end"), *following]
    return [*events, ("kernel", blocks, "begin"), ("kernel", blocks, "end")]


def test_the_next_block_is_copied_while_the_present_one_is_computed_with() -> None:
    count, size = 6, 8
    q, k, v = (torch.randn(1, 2, count * size, 4) for _ in range(3))
    timeline = Timeline()
    stream, kernel = RecordingStream(timeline), RecordingKernel(timeline, count - 1)
    slices = [TokenRange(n * size, (n + 1) * size, RECOMPUTED) for n in range(count)]
    reader = BlockReader(DEVICE, stream, buffers=2, poison=True)
    core = StreamedAttention(kernel, slices, reader, None, block_tokens=1)
    for n, part in enumerate(slices):
        held = OffloadGroups().open(None, swap=False)
        keys, values = (held.put(token_rows(t[:, :, part.start : part.stop])) for t in (k, v))
        core.hold(n, KeysValues(held, keys, values))
    last = slice((count - 1) * size, None)
    own = (q[:, :, last], k[:, :, last], v[:, :, last])
    result, *_ = core.forward(count - 1, *own, AttentionSpec())
    assert timeline.events == overlapping(count - 1)
    torch.testing.assert_close(result.out, CpuFlash().forward(q, k, v, AttentionSpec()).out[:, :, last])
    timeline.events.clear()
    kernel.calls = stream.copies = 0
    core.backward(count - 1, torch.randn_like(result.out), *own, result, AttentionSpec())
    assert timeline.events == overlapping(count - 1)
    stream.close()


# ---- the strategy


@slow_if(lambda stream_from_host: stream_from_host != "hidden")
@pytest.mark.parametrize("stream_from_host", ["attention", "hidden"])
def test_trains_as_plain(stream_from_host: StreamFromHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shorten_measurements(monkeypatch)
    result = fit(MemoStrategy(slice_tokens=7, stream_from_host=stream_from_host, alpha=0.5, test_mode=DELAYS))
    assert max(abs(a - b) for a, b in zip(result.losses, plain().losses, strict=True)) <= 3e-6
    swap = result.plan.swap
    assert (swap.stream_from_host, swap.storage.slice_tokens, swap.alpha, set(result.held)) == (
        stream_from_host,
        7,
        0.5,
        {0},
    )
    saved = tmp_path / "plan.json"
    result.plan.save(saved)
    again = fit(MemoStrategy(slice_tokens=7, stream_from_host=stream_from_host, plan=saved), max_steps=2)
    assert again.plan.swap == swap
    with pytest.warns(UserWarning, match="it was made for slice_tokens=7, and slice_tokens=5 was given"):
        other = fit(MemoStrategy(slice_tokens=5, stream_from_host=stream_from_host, plan=saved), max_steps=2)
    assert other.plan.swap.storage.slice_tokens == 5


@pytest.mark.slow
def test_trains_slice_by_slice_as_plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    shorten_measurements(monkeypatch)
    family = "llama_gqa"
    settings = {"slice_tokens": 7, "stream_from_host": "model", "test_mode": DELAYS}
    result = fit(MemoStrategy(alpha=0.5, **settings), LanguageModel(family))
    assert max(abs(a - b) for a, b in zip(result.losses, plain(LanguageModel(family)).losses, strict=True)) <= 3e-6
    swap = result.plan.swap
    assert (swap.stream_from_host, set(result.held)) == ("model", {0})
    with pytest.raises(ValueError, match="runs a causal language model of transformers slice by slice"):
        fit(MemoStrategy(**settings), LanguageModel("block"))


def test_layers_whose_attention_is_not_causal_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r'stream_from_host="hidden" runs layers slice after slice, but attention of .* needs'
    ):
        fit(MemoStrategy(slice_tokens=7, stream_from_host="hidden"), LanguageModel("encoder_layer"), max_steps=2)
    result = fit(MemoStrategy(slice_tokens=7, alpha=0.5), LanguageModel("encoder_layer"), max_steps=2)
    assert result.plan.swap.stream_from_host == "none"
