"""Delayed copies and poisoned buffers do not change results, but would if a wait were missing."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from support.draws import draws
from support.families import FAMILIES, make_batch
from support.harness import EngineUnderTest, Step, assert_equal, loss_and_gradients
from support.markers.slow import slow_if
from torch import nn

from lightning_memo.engine import TestMode
from lightning_memo.engine.copy_streams import CopyEvent, ThreadCopyStream
from lightning_memo.engine.memory import slot_memory as memory

SEEDS = draws(4)
DELAY_SECONDS = 0.005  # about what the backward of a layer takes
# A copy begins a whole layer before it is needed: only a longer delay brings out that nobody waits for it, and the
# busier the machine, the longer it has to be.
LONGER_DELAYS_SECONDS = (0.03, 0.1, 0.2, 0.2, 1.0)
BATCHES = [make_batch(2, 48, seed=seed) for seed in range(2)]


def build(family: str) -> nn.Module:
    """A model of six layers: four are swapped, so that each rounding buffer changes hands three times."""
    torch.manual_seed(0)
    config = FAMILIES[family].build().config
    config.num_hidden_layers = 6
    return transformers.AutoModelForCausalLM.from_config(config).train()


def two_steps(model: nn.Module) -> list[Step]:
    return [loss_and_gradients(model, batch, seed=seed) for seed, batch in enumerate(BATCHES)]


class Steps:
    """A model with an engine whose test mode can be changed."""

    def __init__(self, family: str, alpha: float, slice_tokens: int | None = None) -> None:
        self.under_test = EngineUnderTest(build(family), test_mode=None, check_slices=False)
        self._alpha, self._slice_tokens = alpha, slice_tokens
        with self.under_test:
            self.under_test.profile_step(BATCHES[0])

    def run(self, test_mode: TestMode | None) -> list[Step]:
        self.under_test.set_test_mode(test_mode)
        with self.under_test:
            self.under_test.load(self._alpha, self._slice_tokens)
            steps = two_steps(self.under_test.model)
            self.under_test.assert_empty()
            return steps

    @functools.cached_property
    def expected(self) -> list[Step]:
        return self.run(None)


@functools.cache
def profiled(family: str, alpha: float, slice_tokens: int | None) -> Steps:
    """Profiled steps with their results, before a test breaks anything."""
    steps = Steps(family, alpha, slice_tokens)
    assert steps.expected[0].distance(steps.expected[1]) > 0.01
    return steps


CASES = [
    pytest.param(
        family, alpha, slice_tokens, id=f"{family}-alpha{alpha:g}" + f"-slices{slice_tokens}" * bool(slice_tokens)
    )
    for family in ("llama", "gpt2_dropout")
    for alpha, slice_tokens in ((0.0, None), (0.5, None), (1.0, None), (0.5, 13))
]
each_case = pytest.mark.parametrize(("family", "alpha", "slice_tokens"), CASES)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "alpha", "slice_tokens"), CASES[:3] + CASES[4:7])
def test_delays_and_poison_change_nothing(family: str, alpha: float, slice_tokens: int | None) -> None:
    steps = profiled(family, alpha, slice_tokens)
    for seed in range(SEEDS):
        for actual, step in zip(steps.run(TestMode(seed, DELAY_SECONDS)), steps.expected, strict=True):
            assert_equal(actual, step)


class HeedlessEvent:
    """An event whose wait does nothing."""

    def __init__(self, event: CopyEvent) -> None:
        self._event = event

    def wait(self) -> None:
        return

    def synchronize(self) -> None:
        self._event.synchronize()


class HeedlessStream(ThreadCopyStream):
    """A broken copy stream, whose copies count as finished at once."""

    def copy(self, *arguments: Any, **subject: Any) -> CopyEvent:
        return HeedlessEvent(super().copy(*arguments, **subject))


def _make_copy_stream(broken: str, device: torch.device, name: str, *arguments: Any) -> ThreadCopyStream:
    return (HeedlessStream if name == broken else ThreadCopyStream)(name, *arguments)


@slow_if(lambda family, alpha: alpha != 0.5 or family != "llama")
@pytest.mark.parametrize("broken", ["offload", "prefetch"])
@each_case
def test_missing_wait_is_noticed(
    monkeypatch: pytest.MonkeyPatch, family: str, alpha: float, slice_tokens: int | None, broken: str
) -> None:
    steps = profiled(family, alpha, slice_tokens)
    monkeypatch.setattr(memory, "make_copy_stream", functools.partial(_make_copy_stream, broken))
    delayed = (steps.run(TestMode(seed, seconds)) for seed, seconds in enumerate(LONGER_DELAYS_SECONDS))
    assert any(_differ(actual, steps.expected) for actual in delayed)


def _differ(actual: list[Step], expected: list[Step]) -> bool:
    pairs = zip(actual, expected, strict=True)
    return any(not torch.equal(a.gradients[name], g) for a, step in pairs for name, g in step.gradients.items())


@slow_if(lambda alpha: alpha != 0.5)
@each_case
def test_everything_released_is_poisoned(family: str, alpha: float, slice_tokens: int | None) -> None:
    steps = profiled(family, alpha, slice_tokens)
    steps.under_test.set_test_mode(TestMode(0, 0.0))
    with steps.under_test as under_test:
        under_test.load(alpha, slice_tokens)
        two_steps(under_test.model)
        slots = under_test.engine.memory
        assert slots is not None
        on_device = [slots.lease(call, swap=False).buffer for call in range(2)]
        for buffer in (*on_device, slots.host.arena.acquire(slots.host.arena.size_bytes)):
            assert buffer is not None
            assert buffer.view(torch.float32).isnan().all()
            assert buffer.view(torch.bfloat16).isnan().all()
