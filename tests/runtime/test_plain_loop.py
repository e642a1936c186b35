"""The runtime drives a training loop in plain PyTorch, with the results of plain training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.families import FAMILIES
from support.trainer_harness import Sequences, shorten_measurements
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_memo.config import MemoConfig
from lightning_memo.runtime.memory_plans.memory_state import MemoryState
from lightning_memo.runtime.start_engine import start_engine
from lightning_memo.runtime.training_runtime import TrainingRuntime

CPU = torch.device("cpu")
STEPS = 8


@dataclass
class PlainRun:
    """A loop of one process without a framework."""

    model: nn.Module
    optimizers: list[Optimizer]
    path: Path
    precision: str = "32-true"
    rank: int = 0
    processes: int = 1
    accumulated_batches: int = 1
    gradient_clip: float | None = None
    automatic_optimization: bool = True
    step: int = 0
    batch: int = 0
    logs_now: bool = False
    logged: list[Mapping[str, float]] = field(default_factory=list)

    def folder(self) -> Path:
        return self.path

    def log(self, metrics: Mapping[str, float]) -> None:
        self.logged.append(metrics)


def build() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = FAMILIES["llama"].build()
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def batches() -> list[dict[str, Tensor]]:
    ids = Sequences(STEPS)
    return [{name: t[None] for name, t in ids[n].items()} for n in range(STEPS)]


def train(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def train_with_runtime(
    model: nn.Module, optimizer: Optimizer, config: MemoConfig, folder: Path
) -> tuple[list[Tensor], list[MemoryState], TrainingRuntime]:
    engine = start_engine(model, config, CPU, processes=None, trains=True)
    run = PlainRun(model, [optimizer], folder)
    runtime = TrainingRuntime(engine, model, config, None, run)
    losses, states = [], []
    runtime.start()
    assert runtime.memory is not None
    for run.batch, batch in enumerate(batches()):
        runtime.begin_batch()
        optimizer.zero_grad()

        def forward_and_backward(batch: dict[str, Tensor] = batch) -> Tensor:
            loss: Tensor = runtime.forward(lambda: model(**batch).loss)
            runtime.before_backward(loss)
            runtime.backward(loss.backward)
            runtime.after_backward()
            return loss.detach()

        losses.append(runtime.step(forward_and_backward))
        optimizer.step()
        run.step += 1
        while runtime.memory.busy:
            pass
        runtime.end_batch()
        states.append(runtime.memory.state)
    runtime.close(model)
    return losses, states, runtime


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_a_plain_loop_trains_as_without_the_runtime(tmp_path, monkeypatch, alpha):
    shorten_measurements(monkeypatch)
    monkeypatch.setattr("lightning_memo.runtime.memory_plans.memory_planner.cache_folder", lambda: tmp_path / "plans")
    plain, memo = build(), build()
    expected = train(*plain)
    losses, states, runtime = train_with_runtime(*memo, MemoConfig(alpha=alpha), tmp_path)
    assert runtime.plan is not None and runtime.plan.swap.alpha == alpha
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, memo[0].parameters(), plain[0].parameters()))
    assert list(dict.fromkeys(states)) == [MemoryState.RECORDING, MemoryState.SOLVING, MemoryState.SERVING]
    assert runtime.memory is not None and runtime.memory.state is MemoryState.CLOSED
    assert not any("forward" in vars(module) for module in memo[0].modules())
