"""Slices that several processes choose by themselves, as the first step would not fit their devices."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from support.families import FAMILIES
from support.markers.slow import slow_if
from support.parallel_training import Run, train_alone, train_together

from lightning_memo.runtime import planned_slices

BOUND = 1e-5
KIB = 1024
CP2 = {"context_parallel_size": 2, "zero_stage": 3}


class SmallDevice(Callback):
    """Leaves a process so many bytes, and notes the plan.

    Args:
        free_bytes: The bytes of each rank, from the first one on.
    """

    def __init__(self, *free_bytes: int) -> None:
        self._free_bytes, self.notes = free_bytes, {}
        self._undo: Any = None

    def on_train_start(self, trainer: Trainer, *_: Any) -> None:
        free = self._free_bytes[trainer.global_rank % len(self._free_bytes)] * trainer.world_size  # shared on a CPU
        self._undo = mock.patch.object(planned_slices, "free_device_bytes", return_value=free)
        self._undo.start()

    def on_train_end(self, trainer: Trainer, *_: Any) -> None:
        self._undo.stop()
        swap = trainer.strategy.plan.swap
        self.notes = {"slice_tokens": swap.storage.slice_tokens, "stream": swap.stream_from_host}


@slow_if(lambda settings, kib, stream: stream != "hidden" or settings != CP2)
@pytest.mark.parametrize(
    ("settings", "kib", "stream"),
    [
        (CP2, (10_000,), "none"),
        (CP2, (1250,), "attention"),
        (CP2, (720, 10_000), "hidden"),  # one of them decides for all
        (CP2 | {"ulysses_size": 1}, (720,), "hidden"),
        ({"zero_stage": 3}, (720,), "hidden"),
        ({"zero_stage": 1}, (1500,), "attention"),
        ({"tensor_parallel_size": 2}, (720,), "hidden"),
    ],
)
def test_a_step_that_does_not_fit_runs_in_slices(settings: dict[str, Any], kib: tuple[int, ...], stream: str) -> None:
    run = Run(family="llama_gqa", tokens=512, batch=2, layers=3)
    watch = functools.partial(SmallDevice, *(KIB * each for each in kib))
    outcome = train_together(2, run, settings, watch=watch)
    assert set(outcome.notes["stream"]) == {stream} and len(set(outcome.notes["slice_tokens"])) == 1
    errors = outcome.worst_error(train_alone(run))
    assert all(errors[part] <= BOUND for part in ("loss", "norm", "gradients")), errors


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"slice_tokens": 100}, {"stream_from_host": "none"}])
def test_settings_of_a_user_are_left_as_they_are(settings: dict[str, Any]) -> None:
    run = Run(family="llama_gqa", tokens=512, batch=2, layers=3)
    outcome = train_together(2, run, CP2 | settings, watch=functools.partial(SmallDevice, 720 * KIB))
    assert set(outcome.notes["stream"]) == {"none"}


@pytest.mark.slow
def test_layers_that_cannot_be_cut_run_whole() -> None:
    """Their attention draws dropout."""
    run = Run(family=_with_dropout, tokens=512, batch=2, layers=3)
    outcome = train_together(2, run, {"zero_stage": 3}, watch=functools.partial(SmallDevice, 720 * KIB))
    assert set(outcome.notes["stream"]) == {"none"}


def _with_dropout(**sizes: Any) -> torch.nn.Module:
    return FAMILIES["llama_gqa"].build(attention_dropout=0.1, **sizes)
