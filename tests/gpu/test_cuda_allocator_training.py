"""Training on a GPU with the planned allocator."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from lightning.pytorch import Callback
from support.devices import emulated_device
from support.families import VOCABULARY
from support.markers.extras import needs_compiler
from support.trainer_harness import LanguageModel, Result, fit, loader
from torch import Tensor, nn

from lightning_memo import MemoStrategy
from lightning_memo.allocator import FREE, MALLOC, AllocatorStats, PlannedAllocator
from lightning_memo.runtime import memory_planner as planning

KIB, MIB = 2**10, 2**20
ALIGNMENT = 512

pytestmark = needs_compiler


def places(events: np.ndarray) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """A plan with separate bytes for each request of a recorded step: sizes and offsets per phase, and arena bytes."""
    mallocs = events[(events["kind"] == MALLOC) & (events["sequence"] >= 0)]
    ends = np.cumsum(-(-mallocs["size"] // ALIGNMENT) * ALIGNMENT)
    offsets = np.concatenate([[0], ends[:-1]])
    phases = []
    for index in range(int(mallocs["phase"].max()) + 1):
        inside = mallocs["phase"] == index
        phases.append((mallocs["size"][inside], offsets[inside]))
    return phases, int(ends[-1])


def test_backward_in_autograds_thread_is_recorded_and_served(allocator, device):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device)
    data = torch.randn(32, 64, device=device)

    def step() -> list[Tensor]:
        """Gradients. The phase of the backward begins in the thread that runs it."""
        model.zero_grad()
        allocator.phase(0)
        loss = (model(data) - data).square().mean()
        loss.register_hook(lambda grad: allocator.phase(1))
        loss.backward()
        allocator.leave()
        return [parameter.grad.clone() for parameter in model.parameters()]

    for _ in range(2):  # libraries take their workspaces
        expected = step()
    allocator.record(KIB)
    step()
    model.zero_grad()
    events = allocator.take_events()
    mallocs = events[events["kind"] == MALLOC]
    assert (mallocs["sequence"] >= 0).all()
    threads = {phase: set(mallocs["thread"][mallocs["phase"] == phase].tolist()) for phase in (0, 1)}
    assert len(threads[0]) == len(threads[1]) == 1
    assert threads[0] == threads[1] if device.type == "cpu" else threads[0] != threads[1]
    assert (events["kind"] == FREE).sum() >= len(mallocs) - 1  # all but the loss, at least
    phases, arena_bytes = places(events)
    assert all(len(sizes) > 0 for sizes, _ in phases)
    allocator.serve(phases, arena_bytes, KIB)
    allocator.reset_stats()
    for _ in range(3):
        served = step()
        assert all(torch.equal(one, other) for one, other in zip(served, expected, strict=True))
    stats = allocator.stats()
    assert (stats.hits, stats.misses, stats.out_of_order) == (3 * len(mallocs), 0, 0)
    model.zero_grad()
    del expected, served


@dataclass
class Watch(Callback):
    """Waits for background work, and records the counters and the memory of PyTorch's allocator."""

    stats: list[AllocatorStats] = field(default_factory=list)
    reserved_bytes: int = 0
    retries: int = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        memory = trainer.strategy.memory
        deadline = time.monotonic() + 120
        while memory is not None and memory.busy and time.monotonic() < deadline:
            time.sleep(0.002)
        if memory is not None and memory.stats is not None:
            self.stats.append(memory.stats)
        if torch.cuda.is_available():
            self.reserved_bytes = torch.cuda.memory_reserved()
            self.retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)


def small_llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def train(device: torch.device, plan_memory: bool, emulated_batch: int = 16) -> tuple[Result, Watch]:
    # Sequences of 64 tokens: the flash kernel adds up the gradients of longer ones in no fixed order.
    batch = 2 if device.type == "cpu" else 128 if emulated_device is None else emulated_batch
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_accumulated_memory_stats()
    watch = Watch()
    result = fit(
        MemoStrategy(alpha=0.5, plan_memory=plan_memory, attention="sdpa"),
        LanguageModel(small_llama), loader(8 * batch, 64, batch),
        accelerator="gpu" if device.type == "cuda" else "cpu", precision="bf16-true", max_steps=20,
        callbacks=[watch],
    )  # fmt: skip
    return result, watch


@pytest.fixture(scope="module")
def plans_elsewhere(tmp_path_factory) -> Iterator[None]:
    """Hides the plans of earlier runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "cache_folder", lambda: tmp_path_factory.mktemp("plans"))
        yield


def test_training_with_a_plan_is_bit_identical(device, plans_elsewhere):
    planned, watch = train(device, plan_memory=True)
    unplanned, _ = train(device, plan_memory=False)
    assert planned.losses == unplanned.losses
    assert len(planned.losses) == 20
    for ours, theirs in zip(planned.module.parameters(), unplanned.module.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    last = watch.stats[-1]
    assert len(watch.stats) >= 8 and last.hits > 0
    assert watch.retries == 0
    assert last.bad_frees == 0
    if emulated_device is not None:
        assert (last.misses, last.out_of_order) == (0, 0)
    # On a GPU, sums of large tensors take a workspace. Layers are compared with themselves in slices in a step that is
    # served, and some of the sums are made among the requests of the step.
    assert last.misses <= 0.005 * last.hits
    assert not PlannedAllocator(device).installed


@pytest.mark.slow
def test_training_with_a_plan_reserves_no_more(device, plans_elsewhere):
    # So many sequences that activations are larger than the segments of PyTorch's allocator.
    planned = train(device, plan_memory=True, emulated_batch=64)[1]
    unplanned = train(device, plan_memory=False, emulated_batch=64)[1]
    assert planned.stats
    assert planned.retries == 0
    assert planned.reserved_bytes <= unplanned.reserved_bytes
