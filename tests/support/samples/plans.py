"""Small plans, traces and placements."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from lightning.pytorch import Callback

from lightning_memo import MemoStrategy
from lightning_memo.artifacts.buffer_placement import PhasePlacement, StepPlacement
from lightning_memo.artifacts.costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import Fingerprint, Plan
from lightning_memo.artifacts.trace import NEVER, Trace
from lightning_memo.runtime import memory_planner as planning
from support.alpha_plans import alpha_swap
from support.trainer_harness import LanguageModel, fit, loader

GIB = 2**30

FINGERPRINT = Fingerprint(
    model="tiny", batch=1, tokens=1000, precision="bf16", device="cuda", torch="2.13", parallel="1"
)


def costs_of(n=6, **changes):
    """Return costs of n equal layers: copying all tokens of one layer takes 1.2 s, its forward pass 0.8 s."""
    costs = LayerCosts(
        batch=1,
        tokens=1000,
        input_bytes=(GIB // 10,) * n,
        attention_bytes=(GIB // 10,) * n,
        other_bytes=(GIB,) * n,
        forward_seconds=(0.8,) * n,
        backward_seconds=(1.5,) * n,
        recompute_seconds=(0.5,) * n,
        outside_seconds=2.0,
        offload_bytes_per_second=float(GIB),
        prefetch_bytes_per_second=float(GIB),
        fixed_device_bytes=2 * GIB,
        transient_device_bytes=GIB,
    )
    return replace(costs, **changes)


def small_plan():
    costs = LayerCosts(
        batch=2,
        tokens=128,
        input_bytes=(10, 10, 10, 10),
        attention_bytes=(20, 20, 20, 20),
        other_bytes=(101, 101, 101, 101),
        forward_seconds=(0.1, 0.1, 0.1, 0.1),
        backward_seconds=(0.2, 0.2, 0.2, 0.2),
        recompute_seconds=(0.05, 0.05, 0.05, 0.05),
        outside_seconds=0.3,
        offload_bytes_per_second=1e9,
        prefetch_bytes_per_second=2e9,
        fixed_device_bytes=1000,
        transient_device_bytes=100,
    )
    return Plan(
        fingerprint=Fingerprint(
            model="tiny", batch=2, tokens=128, precision="bf16", device="cpu", torch="2.13", parallel="1"
        ),
        costs=costs,
        budget=Budget(device_bytes=5000, host_bytes=6000),
        swap=alpha_swap(0.5, 4, 128, tokens=128),
        step_seconds=1.5,
        reason="Because.",
    )


def make(phase, size, death, lane=None, phases=("input", "layer 0 forward", "layer 0 backward")):
    columns = (phase, size, death, [0] * len(size) if lane is None else lane)
    phase, size, death, lane = (np.array(column, np.int64) for column in columns)
    return Trace(phases=phases, phase=phase, size=size, death=death, lane=lane)


@st.composite
def traces(draw):
    count = draw(st.integers(0, 12))
    phase = sorted(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    numbers = {
        name: draw(st.lists(st.integers(low, high), min_size=count, max_size=count))
        for name, low, high in (("size", 0, 2**60), ("death", NEVER, count), ("lane", 0, 1))
    }
    return make(phase, **numbers)


def step_of(rows, phases, peak=100, bound=90):
    """Return a trace and its placement from rows of (phase, size, death, lane, offset)."""
    columns = (
        [np.array(column, np.int64) for column in zip(*rows, strict=True)] if rows else [np.zeros(0, np.int64)] * 5
    )
    phase, size, death, lane, offset = columns
    trace = Trace(phases=tuple(phases), phase=phase, size=size, death=death, lane=lane)
    placed = []
    for number, name in enumerate(phases):
        rows_in_phase = (phase == number) & (lane == 0)
        places = tuple(offset[rows_in_phase].tolist())
        placed.append(PhasePlacement(name=name, sizes=tuple(size[rows_in_phase].tolist()), offsets=places))
    placement = StepPlacement(
        phases=tuple(placed), peak_bytes=peak, lower_bound_bytes=bound, min_bytes=0, threads=1,
        method="<i>by hand</i>", seconds=0.0,
    )  # fmt: skip
    return trace, placement


def small_step(phases=("input", "layer 0 forward", "backward", "layer 0 backward", "optimizer")):
    return step_of(
        [
            (0, 10, 6, 0, 0),
            (1, 30, 3, 0, 10),
            (1, 7, 3, 1, -1),
            (2, 5, NEVER, 0, -1),
            (3, 20, 1, 0, 40),  # over the end of the step
            (4, 40, 0, 0, 60),
        ],
        phases,
    )


def record_step(folder: Path) -> MemoStrategy:
    """Train until memory is planned; the strategy has the trace and the placement of a step."""

    class Wait(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            deadline = time.monotonic() + 120
            while trainer.strategy.memory.busy and time.monotonic() < deadline:
                time.sleep(0.002)

    strategy = MemoStrategy(alpha=0.5, plan_memory=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "cache_folder", lambda: folder / "plans")
        fit(strategy, LanguageModel("llama"), loader(32), max_steps=10, callbacks=[Wait()], default_root_dir=folder)
    return strategy
