"""The recorder records every copy and computation once, in a possible order, and does not change the step."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from support.families import FAMILIES, make_batch
from support.harness import EngineUnderTest, assert_equal

from lightning_memo.artifacts.swap_plan import StreamFromHost
from lightning_memo.artifacts.timeline import COMPUTE, RECOMPUTE, Span, Timeline
from lightning_memo.engine import TestMode

LAYERS = 6
BATCH = make_batch(2, 61)


def recorded(
    alpha: float,
    slice_tokens: int | None = None,
    stream_from_host: StreamFromHost = "none",
    joint_attention: bool = False,
    disk_path: Path | None = None,
    copies_come_first: bool = False,
    longest_delay_seconds: float = 0.001,
) -> tuple[Timeline, int]:
    """The timeline of a step, and the bytes that left the device; checks that the step is the one not recorded.

    Args:
        copies_come_first: The backward of a layer waits for prefetches that were handed in before.
    """
    torch.manual_seed(0)
    config = FAMILIES["llama"].build().config
    config.num_hidden_layers = LAYERS
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    delays = TestMode(seed=3, longest_delay_seconds=longest_delay_seconds)
    settings = {"disk_path": disk_path, "joint_attention": joint_attention}
    with EngineUnderTest(model, delays, slice_tokens, stream_from_host, **settings) as under_test:
        under_test.profile_step(BATCH)
        under_test.load(alpha, slice_tokens, disk_calls=0 if disk_path is None else 2)
        expected = under_test.step(BATCH)
        recorder, memory = under_test.engine.recorder, under_test.engine.memory
        assert memory is not None and not recorder.on
        if copies_come_first:  # a busy machine may run threads late
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.register_hook(lambda _: memory._prefetch.synchronize())
        before = memory.offloaded_bytes
        recorder.start()
        assert_equal(under_test.step(BATCH), expected)
        timeline = recorder.stop()
        left = memory.offloaded_bytes - before
        assert_equal(under_test.step(BATCH), expected)
        with pytest.raises(RuntimeError, match="no step is being recorded"):
            recorder.stop()
    return timeline, left


def of(timeline: Timeline, kind: str, lane: str = COMPUTE) -> list[Span]:
    return [span for span in timeline.spans if (span.kind, span.lane) == (kind, lane)]


def by_layer(spans: list[Span]) -> dict[int | None, Span]:
    found = {span.layer: span for span in spans}
    assert len(found) == len(spans)
    return found


def assert_nested(spans: list[Span]) -> None:
    """Check that the spans of one lane, in order of their start, follow each other or are nested."""
    open_spans: list[Span] = []
    for span in spans:
        assert span.seconds >= 0
        while open_spans and open_spans[-1].stop_seconds <= span.start_seconds:
            open_spans.pop()
        assert not open_spans or span.stop_seconds <= open_spans[-1].stop_seconds, (open_spans[-1], span)
        open_spans.append(span)


WAYS = [
    {"alpha": 0.0},
    {"alpha": 0.5},
    {"alpha": 1.0},
    {"alpha": 0.5, "slice_tokens": 16},
    {"alpha": 0.5, "joint_attention": True},
    {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "hidden"},
    {"alpha": 0.5, "slice_tokens": 16, "stream_from_host": "model"},
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_lanes_do_not_overlap_themselves_and_the_step_is_the_same(way) -> None:
    timeline, left = recorded(**way)
    lanes = {span.lane for span in timeline.spans}
    assert lanes == {COMPUTE, "offload", "prefetch"} | ({RECOMPUTE} if way["alpha"] < 1 else set())
    assert lanes <= set(timeline.lanes)
    assert_nested([span for span in timeline.spans if span.lane in (COMPUTE, RECOMPUTE)])
    for lane in lanes:
        spans = [span for span in timeline.spans if span.lane == lane]
        if lane != COMPUTE:
            assert {span.kind for span in spans} == {"recompute" if lane == RECOMPUTE else "copy"}
            assert all(a.stop_seconds <= b.start_seconds for a, b in pairwise(spans))
    assert all(span.start_seconds >= 0 and span.stop_seconds <= timeline.seconds for span in timeline.spans)
    assert timeline.copied_bytes["offload"] == left
    waits = [span for span in timeline.spans if span.kind == "wait"]
    assert sum(timeline.waited_seconds.values()) == pytest.approx(sum(span.seconds for span in waits))
    assert set(timeline.waited_seconds) == {"offload", "prefetch"}
    assert all(a.stop_seconds <= b.start_seconds for a, b in pairwise(waits))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_copies_run_beside_the_layers_that_they_are_meant_to(alpha: float) -> None:
    timeline, _ = recorded(alpha, copies_come_first=True)
    forward, backward = by_layer(of(timeline, "forward")), by_layer(of(timeline, "backward"))
    assert sorted(forward) == sorted(backward) == list(range(LAYERS))
    assert all(forward[n].stop_seconds <= forward[n + 1].start_seconds for n in range(LAYERS - 1))
    assert all(backward[n + 1].stop_seconds <= backward[n].start_seconds for n in range(LAYERS - 1))
    swapped = set(range(LAYERS - 2))  # the last two stay on the device
    offloads, prefetches = of(timeline, "copy", "offload"), by_layer(of(timeline, "copy", "prefetch"))
    assert {span.layer for span in offloads} == set(prefetches) == swapped
    attention = [span for span in of(timeline, "attention") if span.start_seconds < backward[LAYERS - 1].start_seconds]
    for n in swapped:
        (own,) = [span for span in offloads if span.layer == n]
        computed = [span for span in attention if span.layer == n]
        assert len(computed) == (2 if 0 < alpha < 1 else 1)
        # A slot leaves once the attention of all slices is over, and nothing waits for it before it comes back.
        assert all(own.start_seconds > over.stop_seconds for over in computed)
        assert own.stop_seconds <= prefetches[n].start_seconds
        # It comes back during the backward of the layer behind it, not only when it is needed.
        assert backward[n + 1].start_seconds < prefetches[n].start_seconds < backward[n + 1].stop_seconds
    recomputed = of(timeline, "recompute", RECOMPUTE)
    assert {span.layer for span in recomputed} == (set() if alpha == 1.0 else set(range(LAYERS)))
    for span in recomputed:
        assert backward[span.layer].start_seconds <= span.start_seconds
        assert span.stop_seconds <= backward[span.layer].stop_seconds


@pytest.mark.slow
def test_a_copy_that_is_late_is_waited_for() -> None:
    def most_is_waited_for(longest_delay_seconds: float) -> bool:
        timeline, _ = recorded(1.0, longest_delay_seconds=longest_delay_seconds)
        waited, copied = timeline.waited_seconds, timeline.copied_seconds
        assert all(seconds < timeline.seconds for seconds in waited.values())
        return all(0.5 * copied[stream] < waited[stream] for stream in ("offload", "prefetch"))

    # On a busy machine a layer may take as long as a copy that is late, so that there is nothing left to wait for.
    assert any(map(most_is_waited_for, (0.03, 0.3, 2.0, 8.0)))


@pytest.mark.slow
def test_what_passes_the_disk_has_lanes_of_its_own(tmp_path: Path) -> None:
    timeline, _ = recorded(0.5, disk_path=tmp_path)
    layers = {lane: {span.layer for span in of(timeline, "copy", lane)} for lane in timeline.copied_seconds}
    assert layers["spill"] == layers["unspill"]
    assert layers["offload"] == layers["prefetch"]
    assert layers["spill"] | layers["offload"] == set(range(LAYERS - 2))
    assert len(layers["spill"]) == 2
    assert set(timeline.waited_seconds) == {"offload", "prefetch", "spill", "unspill"}
    assert sum(timeline.waited_seconds.values()) < timeline.seconds
