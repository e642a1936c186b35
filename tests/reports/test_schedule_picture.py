"""Schedule pictures and traces contain every span at its time, and failures leave no partial files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from PIL import Image
from support.commands import ROOT
from support.trainer_harness import LanguageModel, fit, loader, shorten_measurements

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.timeline import COMPUTE, RECOMPUTE, Span, Timeline
from lightning_memo.callbacks import ScheduleRecorder
from lightning_memo.callbacks.run_report import PICTURE_FILE, TRACE_FILE
from lightning_memo.reports.schedule import draw_schedule, write_trace

STEP = Timeline(
    10.0,
    (
        Span(COMPUTE, "forward", 0, None, 1.0, 4.0),
        Span(COMPUTE, "slice", 0, 0, 1.0, 2.0),
        Span(COMPUTE, "attention", 0, 0, 1.2, 1.8),
        Span("offload", "copy", 0, 0, 2.0, 3.0, 2**20),
        Span(COMPUTE, "wait", 0, 1, 3.0, 4.0, stream="offload"),
        Span("prefetch", "copy", 0, None, 4.0, 6.0, 2**20),
        Span(COMPUTE, "backward", 0, None, 5.0, 9.0),
        Span(COMPUTE, "wait", 0, None, 5.0, 6.0, stream="prefetch"),
        Span(RECOMPUTE, "recompute", 0, 1, 6.0, 7.0),
        Span("spill", "copy", 0, None, 7.0, 9.0, 2**20),
    ),
)
BLACK, GREEN, PINK, GREY = (0, 0, 0), (0, 158, 115), (204, 121, 167), (217, 217, 217)


def test_totals() -> None:
    assert STEP.lanes == (COMPUTE, RECOMPUTE, "offload", "prefetch", "spill")
    assert STEP.waited_seconds == {"offload": 1.0, "prefetch": 1.0}
    assert STEP.copied_seconds == {"offload": 1.0, "prefetch": 2.0, "spill": 2.0}
    assert STEP.copied_bytes == dict.fromkeys(("offload", "prefetch", "spill"), 2**20)


def columns_of(picture: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    """Columns of pixels that contain a bar of a color, not only the edge of a letter."""
    return np.nonzero((picture == color).all(axis=2).sum(axis=0) > 15)[0]


def seconds_of(picture: np.ndarray, color: tuple[int, int, int], rows: slice, second: float) -> float:
    """Share of the time axis that has a color in some rows of pixels."""
    return len(columns_of(picture[rows], color)) / second


def test_the_picture_shows_lanes_to_scale(tmp_path: Path) -> None:
    file = tmp_path / "new" / "schedule.png"
    draw_schedule(STEP, file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    picture = np.asarray(Image.open(file).convert("RGB"))
    lanes = slice(0, int(0.8 * len(picture)))  # without the legend
    # What is outside of the layers: before, between and behind.
    columns = columns_of(picture[lanes], GREY)
    second = (columns[-1] - columns[0] + 1) / STEP.seconds
    assert seconds_of(picture, GREY, lanes, second) == pytest.approx(3.0, abs=0.1)
    assert seconds_of(picture, BLACK, slice(0, len(picture) // 4), second) == pytest.approx(2.0, abs=0.1)
    assert seconds_of(picture, GREEN, lanes, second) == pytest.approx(1.0, abs=0.1)
    assert seconds_of(picture, PINK, lanes, second) == pytest.approx(1.0, abs=0.1)
    assert (columns_of(picture[lanes], GREEN)[0] - columns[0]) / second == pytest.approx(6.0, abs=0.05)


def check_trace(file: Path, timeline: Timeline) -> None:
    """The file follows the format of complete and metadata events, and contains every span."""
    document = json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    events = document["traceEvents"]
    assert all({"name", "ph", "pid", "tid"} <= event.keys() for event in events)
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    assert tuple(lanes[n] for n in sorted(lanes)) == timeline.lanes
    complete = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(isinstance(e["ts"], float) and isinstance(e["dur"], float) and e["dur"] >= 0 for e in complete)
    found = [(lanes[e["tid"]], e["cat"], e["args"].get("layer"), e["args"].get("slice")) for e in complete]
    assert found == [(s.lane, s.kind, s.layer, s.part) for s in timeline.spans]
    np.testing.assert_allclose(
        [(e["ts"], e["dur"]) for e in complete], [(1e6 * s.start_seconds, 1e6 * s.seconds) for s in timeline.spans]
    )


def test_the_trace_has_every_span(tmp_path: Path) -> None:
    file = tmp_path / "new" / "schedule.trace.json"
    write_trace(STEP, file)
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    check_trace(file, STEP)
    names = [event["name"] for event in json.loads(file.read_text())["traceEvents"] if event["ph"] == "X"]
    assert names[:5] == [
        "forward layer 0", "layer 0 slice 0", "attention layer 0 slice 0", "offload layer 0 slice 0",
        "wait for offload",
    ]  # fmt: skip


# ---- the callback


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_one_step_is_written_and_no_loss_changes(
    accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shorten_measurements(monkeypatch)
    settings = {"max_steps": 4, "accumulate_grad_batches": accumulate}
    expected = fit(MemoStrategy(alpha=0.5), LanguageModel("llama"), loader(32), **settings)
    recorder = ScheduleRecorder(step=2, folder=tmp_path / "new")
    result = fit(MemoStrategy(alpha=0.5), LanguageModel("llama"), loader(32), callbacks=[recorder], **settings)
    assert result.losses == expected.losses
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [PICTURE_FILE, TRACE_FILE]
    assert recorder.timeline is not None
    check_trace(tmp_path / "new" / TRACE_FILE, recorder.timeline)
    layers = [span.layer for span in recorder.timeline.spans if span.kind == "backward"]
    assert layers == sorted(set(layers), reverse=True) * accumulate


@pytest.mark.slow
def test_what_cannot_be_recorded_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shorten_measurements(monkeypatch)
    with pytest.raises(ValueError, match="step=-1: give the number of an optimizer step"):
        ScheduleRecorder(step=-1)
    with pytest.warns(UserWarning, match="training ended before step 9 was over"):
        fit(MemoStrategy(alpha=0.5), callbacks=[ScheduleRecorder(step=9)])
    with pytest.warns(UserWarning, match="step 1 swapped and recomputed nothing"):
        fit(MemoStrategy(), callbacks=[ScheduleRecorder(step=1)])
    with pytest.warns(UserWarning, match="SingleDeviceStrategy has no schedule to record"):
        fit("auto", callbacks=[ScheduleRecorder(step=1)])
    assert not list(tmp_path.rglob("schedule*"))


def test_the_command_line_has_it_beside_what_is_there_anyway() -> None:
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        callbacks = compose("train", ["callbacks=schedule", "callbacks.schedule.step=3"]).callbacks
        by_itself = compose("train").callbacks
    assert set(callbacks) == set(by_itself)
    assert (callbacks.schedule.step, by_itself.schedule.step) == (3, None)
    assert isinstance(instantiate(callbacks.schedule), ScheduleRecorder)
