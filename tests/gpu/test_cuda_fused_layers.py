"""Feed-forwards and rotary positions of layers by Triton's kernels, compiled."""

from __future__ import annotations

import copy
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from support.families import FAMILIES, make_batch
from support.harness import EngineUnderTest, assert_equal, in_double, loss_and_gradients, times_farther
from support.kernels.counted_kernels import assert_near, count_kernels
from torch import Tensor, nn

from lightning_memo.engine.forward.fused_functions import GatedActivation, Rotation, gated_activation, rotation

pytest.importorskip("triton")

gate_fused: Any = GatedActivation.apply
rotate_fused: Any = Rotation.apply

# Distance of the gradient to fp64 in units of plain training's, as the mean of many batches, which differ.
FARTHER, BATCHES = 1.25, 16
TOKENS = 48
LARGE = 2**31 + 2**16  # elements, whose offsets need more than 32 bits


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    return count_kernels(monkeypatch)


def build(family: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[family].build().to(device, dtype).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("shape", [(3, 17, 45), (2, 300, 1024)])
def test_gated_activations(shape: tuple[int, ...], tanh: bool, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    gate, up = (torch.randn(*shape, device=device).mul(3).to(dtype) for _ in range(2))
    assert_near(lambda *given: gate_fused(*given, tanh), partial(gated_activation, tanh=tanh), [gate, up])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [((35, 3), 12), ((32, 8), 128)])
def test_rotations(heads: tuple[int, int], head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    q, k = (torch.randn(2, 75, n, head_dim, device=device).transpose(1, 2).to(dtype) for n in heads)
    cos, sin = (torch.randn(2, 75, head_dim, device=device).to(dtype) for _ in range(2))

    def exact(*given: Tensor) -> tuple[Tensor, ...]:
        return tuple(rotation(t, cos.to(t.dtype), sin.to(t.dtype)) for t in given)

    assert_near(lambda *given: rotate_fused(*given, cos, sin), exact, [q, k])


def test_more_elements_than_offsets_of_32_bits_reach(device: torch.device) -> None:
    if torch.cuda.mem_get_info(device)[0] < 8 * 2 * LARGE:
        pytest.skip(f"needs {8 * 2 * LARGE >> 30} GiB of free device memory")
    gate, up = (torch.full((LARGE,), value, dtype=torch.bfloat16, device=device) for value in (1.0, 2.0))
    gate[-1] = up[-1] = 4.0
    y = gate_fused(gate.requires_grad_(), up, False)
    (gradient,) = torch.autograd.grad(y, gate, torch.ones_like(y))
    few = gate.detach()[-2:].requires_grad_()
    small = gated_activation(few, up[-2:], False)
    torch.testing.assert_close(y[-2:], small)
    torch.testing.assert_close(gradient[-2:], torch.autograd.grad(small.sum(), few)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma", "qwen3"])
def test_plans_train_alike_and_as_near_to_fp64(
    family: str, dtype: torch.dtype, device: torch.device, calls: Counter[str]
) -> None:
    model, batches = build(family, device, dtype), [make_batch(2, TOKENS, seed=seed) for seed in range(BATCHES)]
    double = in_double(copy.deepcopy(model).cpu())
    with EngineUnderTest(model, device=device, check_slices=False, fused_kernels=True) as under_test:
        first = under_test.profile_step(batches[0])
        for alpha in (0.0, 1.0):
            under_test.load(alpha)
            calls.clear()
            assert_equal(under_test.step(batches[0]), first)
            under_test.assert_as_planned()
        layers = len(under_test.engine.layers)
        assert calls == {"gated": layers, "gated_gradients": layers, "rotated": 4 * layers}
        ours = [under_test.step(batch) for batch in batches]
    exact = [loss_and_gradients(double, batch) for batch in batches]
    plain = [loss_and_gradients(model, batch) for batch in batches]
    assert times_farther(ours, plain, exact) <= FARTHER
