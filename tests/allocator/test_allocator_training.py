"""Training steps with the planned allocator of the CPU."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from support import warm
from support.markers.extras import needs_compiler

from lightning_memo.allocator import MALLOC

KIB = 1024

pytestmark = needs_compiler


def make_plan(events):
    """A plan with separate bytes for each request of a recorded step: sizes and offsets per phase, and arena bytes."""
    mallocs = events[(events["kind"] == MALLOC)]
    ends = np.cumsum((mallocs["size"] + 63) // 64 * 64)
    offsets = np.concatenate([[0], ends[:-1]])
    phases = []
    for index in range(int(mallocs["phase"].max()) + 1):
        inside = mallocs["phase"] == index
        phases.append((mallocs["size"][inside], offsets[inside]))
    return phases, int(ends[-1])


def train(allocator, steps, before_step=lambda step: None, batch_of=lambda step: 32):
    """Losses and weights of a small model; forward is phase 0, backward phase 1."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        before_step(step)
        optimizer.zero_grad()
        data = torch.randn(batch_of(step), 64)
        allocator.phase(0)
        loss = (model(data) - data).square().mean()
        allocator.phase(1)
        loss.backward()
        allocator.leave()
        losses.append(loss.detach().clone())
        del loss
        optimizer.step()
    return torch.stack(losses), [parameter.detach().clone() for parameter in model.parameters()]


def test_training_with_a_plan_is_bit_identical(allocator):
    losses, weights = train(allocator, 6)

    def before_step(step):
        if step == 2:
            allocator.record(KIB)
        if step == 3:
            phases, arena_bytes = make_plan(allocator.take_events())
            allocator.serve(phases, arena_bytes, KIB)

    planned_losses, planned_weights = train(allocator, 6, before_step)
    assert torch.equal(losses, planned_losses)
    assert all(torch.equal(one, other) for one, other in zip(weights, planned_weights, strict=True))
    stats = allocator.stats()
    assert stats.hits > 3 * 8 and stats.misses == 0 and stats.out_of_order == 0


def test_batches_of_other_sizes_cost_misses_and_nothing_else(allocator):
    def batch_of(step):
        return 32 if step < 3 else (32, 7, 32, 64)[step % 4]

    losses, weights = train(allocator, 12, batch_of=batch_of)

    def before_step(step):
        if step == 2:
            allocator.record(KIB)
        if step == 3:
            phases, arena_bytes = make_plan(allocator.take_events())
            allocator.serve(phases, arena_bytes, KIB)

    planned_losses, planned_weights = train(allocator, 12, before_step, batch_of)
    assert torch.equal(losses, planned_losses)
    assert all(torch.equal(one, other) for one, other in zip(weights, planned_weights, strict=True))
    assert allocator.stats().hits > 0 and allocator.stats().miss_size > 0


@pytest.mark.slow
def test_the_benchmark_writes_a_report(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "allocator.py"
    command = [warm.tools() / "python", script, "--quick", "--repeats", "2", "--output", tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "allocator.json").read_text())["results"]
    assert set(row["ratio"]) == {"native", "idle", "planned"} and len(row["ns"]["planned"]) == 2
