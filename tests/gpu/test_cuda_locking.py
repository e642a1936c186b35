"""Training while the host memory of the plan is locked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import Callback
from support.families import VOCABULARY
from support.modes import BY_KIND
from support.trainer_harness import LanguageModel, batches, fit, loader
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.engine.memory import host_pages
from lightning_memo.trials.training_trial import RandomTokens, Trial


class Plans(Callback):
    """Which steps ran by the plan, and which waited for host memory."""

    def __init__(self) -> None:
        self.follows_plan: list[bool] = []

    @override
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self.follows_plan.append(trainer.strategy.follows_plan)


def deep_llama() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=24, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def lock_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    populate = host_pages._populate

    def slowly(*arguments: Any) -> None:
        time.sleep(0.2)
        populate(*arguments)

    monkeypatch.setattr(host_pages, "_populate", slowly)
    monkeypatch.setattr(host_pages, "PART_BYTES", 2**20)


@pytest.mark.usefixtures("own_folder")
def test_steps_run_by_a_smaller_plan_until_host_memory_is_locked(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def train() -> tuple[Any, list[bool]]:
        plans = Plans()
        result = fit(
            MemoStrategy(test_mode=BY_KIND, device_memory="21MiB", host_memory="6MiB", attention="sdpa"),
            LanguageModel(deep_llama), loader(40, 64, 2), accelerator="gpu", precision="32-true", max_steps=20,
            callbacks=[plans],
        )  # fmt: skip
        return result, plans.follows_plan

    expected, follows = train()
    assert follows == [False] + [True] * 19
    lock_slowly(monkeypatch)
    with caplog.at_level("INFO"):
        result, follows = train()
    assert "while" in caplog.text
    assert follows[:2] == [False, False] and follows[-1] and follows == sorted(follows)
    assert result.losses == pytest.approx(expected.losses, rel=1e-5)


class KeepsAGraph(LanguageModel):
    """The loss of the third batch has its backward in the eighth."""

    def __init__(self) -> None:
        super().__init__(deep_llama)
        self.kept: Any = None
        self.gradients: list[torch.Tensor] = []

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = [p.grad.clone() for p in self.parameters() if p.grad is not None]

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if batch_idx == 2:
            self.kept = self.loss(batch)
        if batch_idx == 7:
            loss, self.kept = loss + self.kept, None
        return self.keep(loss)


@pytest.mark.usefixtures("own_folder")
def test_a_graph_is_kept_while_host_memory_is_locked(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"accelerator": "gpu", "precision": "32-true", "accumulate_grad_batches": 8}
    data, plain, module = loader(16, 64, 2), KeepsAGraph(), KeepsAGraph()
    fit("auto", plain, data, max_steps=1, **settings)
    lock_slowly(monkeypatch)
    plans = Plans()
    strategy = MemoStrategy(test_mode=BY_KIND, device_memory="21MiB", host_memory="6MiB", attention="sdpa")
    fit(strategy, module, data, max_steps=1, callbacks=[plans], **settings)
    assert plans.follows_plan[2:4] == [False, False]
    assert module.losses == pytest.approx(plain.losses, rel=1e-5)
    for found, gradient in zip(module.gradients, plain.gradients, strict=True):
        assert float((found - gradient).norm()) <= 1e-5 * float(gradient.norm())


class Locked(Callback):
    """The host memory that is locked or is going to be, before each batch."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    @override
    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.strategy.plan is not None:
            self.sizes.append(trainer.strategy.engine.pages._parts[-1].span.stop)


@pytest.mark.usefixtures("own_folder")
def test_no_more_is_locked_than_the_plan_uses_beside_the_disk(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lock_slowly(monkeypatch)
    locked = Locked()
    result = fit(
        MemoStrategy(
            test_mode=BY_KIND, device_memory="21MiB", host_memory="3MiB", attention="sdpa", disk_path=tmp_path,
            disk_memory="64MiB",
        ),
        LanguageModel(deep_llama), loader(40, 64, 2), accelerator="gpu", precision="32-true", max_steps=12,
        callbacks=[locked],
    )  # fmt: skip
    swap = result.plan.swap
    assert swap.disk_bytes > 0
    assert set(locked.sizes) == {swap.memory.host}


class FollowsPlan(LanguageModel):
    """Notes which steps run by the plan."""

    def __init__(self) -> None:
        super().__init__(deep_llama)
        self.follows_plan: list[bool] = []

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        strategy: Any = self.trainer.strategy
        self.follows_plan.append(strategy.follows_plan)
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("own_folder")
def test_trials_measure_a_step_by_the_plan(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    lock_slowly(monkeypatch)
    settings = {"test_mode": BY_KIND, "device_memory": "21MiB", "host_memory": "6MiB", "attention": "sdpa"}
    module, trainer = FollowsPlan(), {"accelerator": "gpu", "precision": "32-true"}
    batch_of = RandomTokens(vocabulary=VOCABULARY, batch_size=2)
    trial = Trial(
        strategy_factory=MemoStrategy, module=module, batch_of=batch_of, settings=settings, trainer=trainer, steps=2
    )
    attempt = trial(64)
    assert attempt.fits and attempt.step_seconds is not None
    assert module.follows_plan[:2] == [False, False] and module.follows_plan[-1]


@pytest.mark.usefixtures("own_folder")
def test_host_memory_stays_locked_while_a_longer_batch_is_profiled(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_pages, "PART_BYTES", 2**20)
    unlock = host_pages._unlock
    unlocked: list[int] = []

    def noted(memory: torch.Tensor) -> None:
        unlocked.append(memory.nbytes)
        unlock(memory)

    monkeypatch.setattr(host_pages, "_unlock", noted)
    locked = Locked()
    data = [batch for tokens in (32, 48, 64) for batch in loader(4, tokens, 2)]
    strategy = MemoStrategy(test_mode=BY_KIND, device_memory="21MiB", host_memory="6MiB", attention="sdpa")
    module = LanguageModel(deep_llama)
    fit(strategy, module, batches(data), accelerator="gpu", precision="32-true", callbacks=[locked], max_epochs=1)
    assert locked.sizes == sorted(locked.sizes) and locked.sizes[-1] > locked.sizes[0] > 2**20
    assert unlocked.count(2**20) == locked.sizes[-1] // 2**20  # each part that is complete, when training has ended
