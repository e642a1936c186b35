"""Trainers of Hugging Face and TRL train with MemoCallback as they do without."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DynamoBackend
from peft import LoraConfig
from support.hf_trainers import ARGUMENTS, Outcome, of_rows, preferring, rewarded, supervised, train
from support.markers.slow import slow_if
from support.modes import BY_KIND
from support.processes import run_in_processes
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_memo import MemoCallback
from lightning_memo.artifacts.plan import Plan
from lightning_memo.profiler import measured_costs


@pytest.fixture(autouse=True)
def own_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARGUMENTS, "output_dir", str(tmp_path))


@slow_if(
    lambda family, settings: (family, "slice_tokens" in settings) not in (("llama", True), ("gpt2_dropout", False))
)
@pytest.mark.parametrize(
    ("family", "arguments"),
    [("llama", {"gradient_accumulation_steps": 2}), ("gpt2_dropout", {"eval_strategy": "steps", "eval_steps": 2})],
)
@pytest.mark.parametrize(
    "settings", [{"alpha": 0.5}, {"slice_tokens": 16, "stream_from_host": "hidden"}], ids=["half", "slices"]
)
def test_trainer(
    family: str, arguments: dict[str, Any], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise alpha would depend on how busy the machine is.
    monkeypatch.setattr(measured_costs, "copy_bandwidth", lambda *_: (1e15, 1e15))
    if family == "gpt2_dropout" and "slice_tokens" in settings:
        settings = {"alpha": 1.0}
    memo = MemoCallback(**settings)
    train(of_rows(memo, family, **arguments)).compare(train(of_rows(None, family, **arguments)))
    assert memo.plan is not None
    assert memo.plan.swap.alpha == settings.get("alpha", 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"alpha": 0.5}, {"test_mode": BY_KIND, "device_memory": "1.5MiB"}], ids=str)
def test_a_run_resumes_within_an_epoch(settings: dict[str, Any], tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 2

    arguments = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}
    plain = train(of_rows(None, "gpt2_dropout", gradient_accumulation_steps=2))
    interrupted = of_rows(MemoCallback(**settings), "gpt2_dropout", **arguments)
    interrupted.add_callback(Stop())
    train(interrupted)
    memo = MemoCallback(**settings)
    resumed = of_rows(memo, "gpt2_dropout", **arguments)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    Outcome(resumed).compare(plain)
    assert memo.plan is not None and not memo.plan.swap.plain


def of_rank(memo: bool) -> tuple[list[float], dict[str, Tensor]]:
    callback = MemoCallback(alpha=0.5) if memo else None
    trainer = of_rows(callback, output_dir=".")
    outcome = train(trainer)
    assert trainer.accelerator.num_processes == 2
    assert callback is None or callback.plan is not None
    return [entry["loss"] for entry in outcome.logs], outcome.weights


@pytest.mark.slow
def test_two_processes() -> None:
    """Accelerate wraps the model by DistributedDataParallel."""
    plain, memo = (run_in_processes(2, of_rank, memo) for memo in (False, True))
    for (losses, weights), (expected_losses, expected) in zip(memo, plain, strict=True):
        assert losses == pytest.approx(expected_losses, rel=2e-5)
        for name, t in expected.items():
            torch.testing.assert_close(weights[name], t, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("make", [supervised, preferring])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_trainers_of_trl(make: Any, lora: bool) -> None:
    """DPO computes the reference with the adapter switched off, or with another model."""
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear") if lora else None
    memo = MemoCallback(alpha=0.5)
    train(make(memo, adapter)).compare(train(make(None, adapter)))
    assert memo.plan is not None
    assert memo.plan.swap.alpha == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("beta", [0.0, 0.1], ids=["no reference", "reference"])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_generation_between_steps(lora: bool, beta: float) -> None:
    """GRPO generates with the model that it trains. The reference is a second model, or the one without its adapter."""
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear") if lora else None
    memo = MemoCallback(alpha=0.5, loss_chunk_tokens=16)
    # Advantages of a group cancel: a loss of nearly 0 is a sum of terms of about 1.
    train(rewarded(memo, adapter, beta=beta)).compare(train(rewarded(None, adapter, beta=beta)), rounding=1e-6)
    assert memo.plan is not None
    assert memo.plan.swap.alpha == 0.5


@pytest.mark.slow
def test_the_plan_is_written_to_the_output_folder(tmp_path: Path) -> None:
    train(of_rows(MemoCallback(alpha=0.5)))
    assert Plan.load(tmp_path / "memo_plan.json").swap.alpha == 0.5


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyError("stop")


@pytest.mark.slow
def test_another_training_after_an_exception() -> None:
    trainer = of_rows(memo := MemoCallback(alpha=0.5))
    trainer.add_callback(Stop())
    with pytest.raises(KeyError):
        trainer.train()
    trainer.remove_callback(Stop)
    trainer.train()
    assert memo.loop is not None
    assert not memo.loop.is_active
    assert not any("forward" in vars(module) for module in trainer.model.modules())


class FailsWhenServed(TrainerCallback):
    """Waits for planned memory; the next forward or backward fails then."""

    def __init__(self, memo: MemoCallback, model: nn.Module, fails_in: str) -> None:
        self.memo, self.armed, self.fails_in = memo, False, fails_in
        layer = model.model.layers[1]
        layer.register_forward_pre_hook(lambda *_: self.fail("forward"))
        layer.mlp.up_proj.weight.register_hook(lambda _: self.fail("backward"))

    def fail(self, where: str) -> None:
        if self.armed and where == self.fails_in:
            raise KeyError("stop")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        memory = self.memo.loop.memory
        while memory.busy:
            time.sleep(0.01)
        self.armed = memory.stats is not None


@pytest.mark.slow
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_the_memory_of_a_training_after_a_failed_one_is_planned(fails_in: str) -> None:
    """By another callback; nobody closes the first one, nor leaves its step."""
    (plain := of_rows(None)).train()
    failing = of_rows(first := MemoCallback(alpha=0.5, plan_memory=True), max_steps=1000)
    failing.add_callback(FailsWhenServed(first, failing.model, fails_in))
    with pytest.raises(KeyError):
        failing.train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="lightning_memo: memory is not planned")
        trainer = of_rows(second := MemoCallback(alpha=0.5, plan_memory=True))
        trainer.add_callback(Waits(second))
        trainer.train()
    Outcome(trainer).compare(Outcome(plain))
    assert first.loop is not None and first.loop.is_active
    first.close()
    assert second.loop is not None and second.loop.memory is not None and second.loop.memory.use is not None


class Waits(FailsWhenServed):
    def __init__(self, memo: MemoCallback) -> None:
        self.memo = memo


@pytest.mark.slow
def test_close_restores_the_model() -> None:
    trainer = of_rows(memo := MemoCallback(alpha=0.5))
    trainer.add_callback(Stop())
    with pytest.raises(KeyError):
        trainer.train()
    memo.close()
    memo.close()
    assert not any("forward" in vars(module) for module in trainer.model.modules())


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"gradient_checkpointing": True}, "_checkpointing=True contradicts MemoCallback"),
        ({"fp16": True}, "fp16=True is not supported by MemoCallback: give bf16=True"),
    ],
    ids=["checkpointing", "fp16"],
)
def test_refused_arguments(arguments: dict[str, Any], line: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        with pytest.raises(ValueError, match=line) as caught:
            of_rows(MemoCallback(), **arguments)
        trainer = of_rows(None, **arguments)
        trainer.add_callback(MemoCallback())
        with pytest.raises(ValueError, match=line):
            trainer.train()
    assert "\n" not in str(caught.value)


def test_regional_compilation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = of_rows(MemoCallback())
    compilation = AcceleratorState().dynamo_plugin
    monkeypatch.setattr(compilation, "backend", DynamoBackend.AOT_EAGER)
    monkeypatch.setattr(compilation, "use_regional_compilation", True)
    with pytest.raises(ValueError, match="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=0") as caught:
        trainer.train()
    assert "\n" not in str(caught.value)


def test_processes_that_generate_share_no_rows() -> None:
    with pytest.raises(ValueError, match=r"context_parallel_size=2: each process generates .*GRPOConfig"):
        rewarded(MemoCallback(context_parallel_size=2))


def test_refused_settings() -> None:
    with pytest.raises(TypeError, match=r"alhpa=0\.5 is no setting of MemoCallback: did you mean alpha\?$"):
        MemoCallback(alhpa=0.5)
    with pytest.raises(ValueError, match="not a fraction of the tokens"):
        MemoCallback(alpha=2)


class NoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.head(x).sum()}


def test_a_model_without_layers() -> None:
    data = [{"x": torch.ones(4)} for _ in range(8)]
    trainer = Trainer(NoLayers(), TrainingArguments(**ARGUMENTS), train_dataset=data, callbacks=[MemoCallback()])
    with pytest.raises(ValueError, match="layers"):
        trainer.train()
