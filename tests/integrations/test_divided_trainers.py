"""Trainers of Hugging Face and TRL whose processes share the tokens of their rows train as in one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from safetensors.torch import load_file
from support.devices import skip_ring_on_cuda
from support.hf_trainers import Outcome, build, of_rows, preferring, rewarded, rows, supervised, train
from support.markers.slow import slow_if
from support.processes import run_in_processes
from torch.distributed.tensor import DTensor
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_memo import MemoCallback

RING, ULYSSES = ({"context_parallel_size": 2, "ulysses_size": size, "alpha": 0.5} for size in (1, 2))
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "gradient_accumulation_steps": 2}
SHARDED = {
    "fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True,
    "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
}  # fmt: skip
PACKED = {"packing": True, "max_length": 64}

Make = Callable[..., Trainer]


class Sharding(Trainer):
    """A trainer in processes of which Accelerate knows that they have GPUs, without which it does not shard."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        PartialState().distributed_type = DistributedType.MULTI_GPU
        super().__init__(*args, **kwargs)


def sharded_rows(memo: MemoCallback | None, **arguments: Any) -> Trainer:
    if memo is None:
        return of_rows(memo, **arguments)
    return of_rows(memo, kind=Sharding, fsdp=True, fsdp_config=SHARDED, **arguments)


def with_adapter(make: Make) -> Make:
    adapter = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    return lambda memo, **arguments: make(memo, adapter, **arguments)


def adapted(memo: MemoCallback | None, **arguments: Any) -> Trainer:
    return with_adapter(preferring)(memo, **arguments)


def adapted_to_text(memo: MemoCallback | None, **arguments: Any) -> Trainer:
    return with_adapter(supervised)(memo, **arguments)


def of_rank(make: Make, settings: dict[str, Any], arguments: dict[str, Any]) -> tuple[Outcome, list[float]]:
    groups = dist.get_world_size() // 2
    with mock.patch.dict(os.environ):  # of which arguments for FSDP set some
        memo = MemoCallback(**settings)
        trainer = make(memo, output_dir=".", per_device_train_batch_size=2 // groups, **arguments)
        outcome = train(trainer)
    assert memo.plan is not None
    assert any(isinstance(p, DTensor) for p in trainer.model.parameters()) == (make is sharded_rows)
    return outcome, evaluated(trainer)


def evaluated(trainer: Trainer) -> list[float]:
    return [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]


CASES: list[tuple[int, Make, dict[str, Any], dict[str, Any]]] = [
    (2, of_rows, RING, EVALUATED),
    (4, sharded_rows, ULYSSES, EVALUATED),
    (2, supervised, ULYSSES, PACKED),
    (2, adapted, RING, {}),
    (2, supervised, RING, {"loss_type": "dft"}),
    (2, adapted_to_text, ULYSSES, {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False}),
    (2, preferring, ULYSSES | {"loss_chunk_tokens": 16}, {}),
    (4, of_rows, RING, EVALUATED),
    (4, supervised, RING, {}),
    (4, sharded_rows, RING, {}),
]


@slow_if(lambda case: case not in CASES[:4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, (case[0], case[1].__name__, *case[3]))))
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_processes_that_share_rows(case: tuple[int, Make, dict[str, Any], dict[str, Any]], tmp_path: Path) -> None:
    processes, make, settings, arguments = case
    skip_ring_on_cuda(settings)
    plain = make(None, output_dir=str(tmp_path), per_device_train_batch_size=2, **arguments)
    expected = train(plain)
    for outcome, losses in run_in_processes(processes, of_rank, make, settings, arguments):
        outcome.compare(expected)
        assert losses == pytest.approx(evaluated(plain), rel=1e-5)


# ---- processes with rows of their own


def generated(memo: bool) -> Outcome:
    return train(rewarded(MemoCallback(alpha=0.5) if memo else None, output_dir=".", beta=0.1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_processes_that_generate_train_as_without_the_callback() -> None:
    """GRPO in two processes, whose completions differ and whose gradients are averaged by DDP."""
    plain, own = (run_in_processes(2, generated, memo) for memo in (False, True))
    for outcome, expected in zip(own, plain, strict=True):
        outcome.compare(expected, rounding=1e-6)


# ---- checkpoints


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


SAVED = {"save_strategy": "steps", "save_steps": 2, "gradient_accumulation_steps": 2}


def resumed(folder: str) -> Outcome:
    interrupted = of_rows(MemoCallback(**ULYSSES), output_dir=folder, **SAVED)
    interrupted.add_callback(Stop())
    train(interrupted)
    trainer = of_rows(MemoCallback(**ULYSSES), output_dir=folder, **SAVED)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return Outcome(trainer)


@pytest.mark.slow
def test_a_run_resumes_from_the_weights_of_one_process(tmp_path: Path) -> None:
    expected = train(of_rows(None, output_dir=str(tmp_path / "plain"), **SAVED))
    for outcome in run_in_processes(2, resumed, str(tmp_path / "shared")):
        outcome.compare(expected)
    weights, saved = (load_file(tmp_path / name / "checkpoint-4/model.safetensors") for name in ("plain", "shared"))
    for name, t in weights.items():
        torch.testing.assert_close(saved[name], t, rtol=1e-5, atol=1e-6)


# ---- refusals


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(rows())


def refusals() -> dict[str, str]:
    """Return a line for each refusal."""
    lines: dict[str, str] = {}

    def attempt(name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except ValueError as error:
            lines[name] = str(error)

    def make(**arguments: Any) -> Trainer:
        return of_rows(MemoCallback(**ULYSSES), output_dir=".", **arguments)

    attempt("evaluation", make().evaluate)
    (trainer := make(max_steps=1)).train()
    attempt("second training", trainer.train)
    (late := of_rows(None, output_dir=".")).add_callback(MemoCallback(**ULYSSES))
    attempt("late callback", late.train)
    settings = TrainingArguments(output_dir=".", max_steps=1, report_to=[], use_cpu=trainer.args.use_cpu)
    stream = Trainer(build(), settings, train_dataset=Stream(), callbacks=[MemoCallback(**ULYSSES)])
    attempt("dispatched", stream.train)
    attempt("precomputed", lambda: preferring(MemoCallback(**ULYSSES), output_dir=".", precompute_ref_log_probs=True))
    attempt("three", lambda: of_rows(MemoCallback(context_parallel_size=3), output_dir="."))
    return lines


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_refusals() -> None:
    for lines in run_in_processes(2, refusals):
        assert not any("\n" in line for line in lines.values())
        assert "an evaluation before train() would count rows more than once" in lines["evaluation"]
        assert "make a new Trainer with callbacks=[MemoCallback(...)]" in lines["second training"]
        assert lines["late callback"] == lines["second training"]
        assert '"dispatch_batches": False' in lines["dispatched"]
        assert "set precompute_ref_log_probs=False" in lines["precomputed"]
        assert "context_parallel_size=3 does not divide the 2 processes" in lines["three"]
