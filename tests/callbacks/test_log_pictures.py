"""Loggers that take images get the pictures of a run; others get none."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image
from support.samples.callbacks import Watch
from support.trainer_harness import LanguageModel, fit, loader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_memo import MemoStrategy
from lightning_memo.callbacks import ScheduleRecorder, WriteReport

STEPS = 8  # by then memory is planned
PICTURES = {"memo/memory_curve", "memo/memory_map", "memo/schedule"}


def images(folder: Path) -> dict[str, list[tuple[int, np.ndarray]]]:
    """The steps and pixels of the images in the event file of a folder."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()
    found = {name: events.Images(name) for name in events.Tags()["images"]}
    return {
        name: [(image.step, np.asarray(Image.open(io.BytesIO(image.encoded_image_string)))) for image in logged]
        for name, logged in found.items()
    }


@pytest.mark.slow
def test_tensorboard_shows_the_files_of_the_run(tmp_path: Path) -> None:
    loggers = [TensorBoardLogger(tmp_path, "board", ""), CSVLogger(tmp_path, "csv", "")]
    # Another alpha than elsewhere, because the plan of memory is cached for later runs.
    fit(
        MemoStrategy(alpha=0.625, plan_memory=True), LanguageModel("llama"), loader(STEPS), max_steps=STEPS,
        logger=loggers, callbacks=[Watch(), ScheduleRecorder(step=None), WriteReport()],
    )  # fmt: skip
    found = images(tmp_path / "board")
    assert set(found) == PICTURES
    for name, logged in found.items():
        ((step, pixels),) = logged
        assert step == STEPS
        file = tmp_path / "board" / f"{name.removeprefix('memo/')}.png"
        assert np.array_equal(pixels, np.asarray(Image.open(file)))
    assert not list((tmp_path / "csv").rglob("*.png"))


def test_the_schedule_is_logged_between_steps_if_its_step_is_given(tmp_path: Path) -> None:
    fit(
        MemoStrategy(alpha=0.5), LanguageModel("llama"), loader(6), max_steps=6,
        logger=TensorBoardLogger(tmp_path, "board", ""), callbacks=[ScheduleRecorder(step=2), WriteReport()],
    )  # fmt: skip
    found = images(tmp_path / "board")
    assert set(found) == {"memo/schedule"} and [step for step, _ in found["memo/schedule"]] == [3]
