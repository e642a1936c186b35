"""A plan predicts the device memory of the steps after the profiled one."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformers
from lightning.pytorch import Callback, Trainer
from support.families import VOCABULARY
from support.trainer_harness import LanguageModel, batches, fit, listening, shorten_measurements
from torch import nn
from typing_extensions import override

from lightning_memo import MemoStrategy
from lightning_memo.profiler.memory_meter import (
    AllocationRecorder,
    AllocationRequest,
    PeakMeter,
    StepTimes,
    WorkingSet,
    working_set,
)

TOKENS = 512
SLICES = {"slice_tokens": 64}


def build() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=172, num_hidden_layers=4, num_attention_heads=8,
        vocab_size=VOCABULARY, max_position_embeddings=TOKENS, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).train()


class PeakOfLaterSteps(Callback):
    """Measures the peak of two steps that run by the plan. Gradients of the first one live into the second."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._open = ExitStack()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.optimizers[0].zero_grad()
            self._meter = self._open.enter_context(PeakMeter(torch.device("cpu")))

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._open.close()
            self.peak_bytes = self._meter.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"alpha": 0.5},
        {"alpha": 0.5, "tokens": 2048},
        {"alpha": 1.0},
        {"device_memory": "8GiB"},  # plain training fits
        {"alpha": 0.0, "stream_from_host": "hidden"} | SLICES,
        {"alpha": 0.5, "stream_from_host": "model"} | SLICES,
    ],
    ids=["half", "half_long", "swapped", "plain", "stream_from_host", "slice_schedule"],
)
def test_the_working_set_is_what_was_planned(monkeypatch, settings):
    shorten_measurements(monkeypatch)
    settings = dict(settings)
    ids = torch.randint(0, VOCABULARY, (1, settings.pop("tokens", TOKENS)))
    peak, module, strategy = PeakOfLaterSteps(), LanguageModel(build), MemoStrategy(**settings)
    fit(strategy, module, batches([{"input_ids": ids, "labels": ids}] * 3), max_steps=3, callbacks=[peak])
    gradients = sum(p.nbytes for p in module.parameters())
    measured = peak.peak_bytes - gradients + strategy.plan.swap.memory.buffer_bytes
    planned = strategy.plan.working_set_bytes
    assert max(measured / planned, planned / measured) <= 1.1
    # Weights, gradients, and two moments and a count of steps for each.
    state = 4 * gradients + sum(4 for _ in module.parameters())
    buffers = sum(b.nbytes for b in module.buffers())
    assert strategy.plan.device_bytes == planned + state + buffers


def test_what_stays_is_no_part_of_the_working_set():
    kept, forward, backward, gradient = 1, 2, 3, 4
    requests = [
        AllocationRequest(10, kept, 1000),
        AllocationRequest(11, forward, 50),
        AllocationRequest(20, backward, 30),
        AllocationRequest(21, gradient, 20),
        AllocationRequest(22, forward, -50),
        AllocationRequest(30, backward, -30),
        AllocationRequest(31, forward, 60),  # the address again
        AllocationRequest(32, forward, -60),
        AllocationRequest(33, 9, -500),  # from before
    ]
    times = StepTimes(backward=20, layers=20, end=30)
    # A gradient that is not there yet leaves room, unless it was there before.
    assert working_set(requests[:3] + requests[4:], times) == WorkingSet(layers=80, outside=60)
    assert working_set(requests, times) == WorkingSet(layers=80, outside=60)
    early = [requests[0], requests[1], requests[2], requests[4], requests[3], *requests[5:]]
    early[3], early[4] = AllocationRequest(21, forward, -50), AllocationRequest(22, gradient, 20)
    assert working_set(early, times) == WorkingSet(layers=60, outside=60)
    assert working_set(early, times, accumulating=True) == WorkingSet(layers=80, outside=60)
    assert working_set(requests, StepTimes()) == WorkingSet(layers=0, outside=80)


def test_a_profiler_of_the_user_leaves_an_estimate(monkeypatch):
    shorten_measurements(monkeypatch)
    strategy = MemoStrategy(alpha=0.5)
    with torch.autograd.profiler.profile(), listening() as heard:
        fit(strategy, LanguageModel(build), max_steps=1)
    assert strategy.plan.costs.backward_device_bytes > 0
    assert any("another profiler runs" in line for line in heard)


def test_only_the_first_step_is_metered():
    """If no layer is trained, nothing is planned, and other code can measure memory."""

    def frozen() -> nn.Module:
        model = build()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lm_head" in name)
        return model

    class Metering(Callback):
        @override
        def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
            if trainer.global_step == 1:
                assert AllocationRecorder().stop() == []

    result = fit(MemoStrategy(), LanguageModel(frozen), max_steps=2, callbacks=[Metering()])
    assert result.plan is None


def test_an_interrupted_step_leaves_no_recorder_running():
    class Broken(LanguageModel):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        fit(MemoStrategy(), Broken(build))
    assert AllocationRecorder().stop() == []
