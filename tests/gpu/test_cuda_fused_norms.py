"""Norms of layers that run by PyTorch's kernel for root mean squares, and those that do not agree with it."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from support.families import FAMILIES, make_batch
from support.harness import EngineUnderTest, Step, assert_equal, in_double, loss_and_gradients, times_farther
from torch.utils._python_dispatch import TorchDispatchMode

FUSED = torch.ops.aten._fused_rms_norm.default
# Distance of the gradient to fp64 in units of plain training's, as the mean of many batches, which differ.
FARTHER, BATCHES = 1.25, 16
TOKENS = 48


class Operators(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += 1
        return func(*args, **kwargs or {})


def build(family: str, device: torch.device, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return FAMILIES[family].build().to(device, dtype).train()


def step_by_fused(model: Any, device: torch.device) -> tuple[Step, int]:
    """A step that computes nothing again, and how many norms ran by the kernel."""
    batch = make_batch(2, TOKENS)
    with EngineUnderTest(model, device=device, check_slices=False, fused_kernels=True) as under_test:
        under_test.profile_step(batch)
        under_test.load(1.0)
        with Operators() as operators:
            return under_test.step(batch), operators.counts[FUSED]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "norms"), [("llama", 2), ("qwen3", 4)])
def test_plans_train_alike_and_as_near_to_fp64(
    family: str, norms: int, dtype: torch.dtype, device: torch.device
) -> None:
    model, batches = build(family, device, dtype), [make_batch(2, TOKENS, seed=seed) for seed in range(BATCHES)]
    double = in_double(copy.deepcopy(model).cpu())
    with EngineUnderTest(model, device=device, check_slices=False, fused_kernels=True) as under_test:
        first = under_test.profile_step(batches[0])
        for alpha in (0.0, 1.0):
            under_test.load(alpha)
            with Operators() as operators:
                assert_equal(under_test.step(batches[0]), first)
            under_test.assert_as_planned()
        assert operators.counts[FUSED] == norms * len(under_test.engine.layers)
        ours = [under_test.step(batch) for batch in batches]
    exact = [loss_and_gradients(double, batch) for batch in batches]
    plain = [loss_and_gradients(model, batch) for batch in batches]
    assert times_farther(ours, plain, exact) <= FARTHER


def test_norms_that_do_not_agree_run_as_they_are(device: torch.device) -> None:
    """Those of Gemma add one to their weight."""
    model = build("gemma", device, torch.bfloat16)
    _, fused = step_by_fused(model, device)
    assert fused == 0


def test_a_norm_with_a_forward_of_its_own_runs_as_it_is(device: torch.device) -> None:
    model = build("llama", device, torch.float32)
    norm = model.model.layers[0].input_layernorm
    own = norm.forward
    norm.forward = lambda x: own(x) * 2
    plain = loss_and_gradients(model, make_batch(2, TOKENS))
    step, fused = step_by_fused(model, device)
    assert step.distance(plain) <= 1e-5
    assert fused == 2 * len(model.model.layers) - 1


def test_the_setting_turns_it_off(device: torch.device) -> None:
    model, batch = build("llama", device, torch.bfloat16), make_batch(2, TOKENS)
    plain = loss_and_gradients(model, batch)
    with EngineUnderTest(model, device=device) as under_test, Operators() as operators:
        assert_equal(under_test.profile_step(batch), plain)
    assert operators.counts[FUSED] == 0
