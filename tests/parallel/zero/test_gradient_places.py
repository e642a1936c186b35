"""Gradients that FSDP2 has not reduced yet, in bf16 with reductions in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.devices import DEVICE
from support.processes import run_in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import override

from lightning_memo.parallel.fsdp_units import accumulating, forget_unfinished
from lightning_memo.parallel.local_tensors import local_part
from lightning_memo.parallel.pipeline.pipeline_gradients import gradient_places
from lightning_memo.parallel.zero_sharding import ZeroSettings, shard_state


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("the backward fails")


class _Twice(nn.Module):
    """Uses its weight twice, so that its gradient is a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.breaks = False

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.linear(x))
        return self.linear(_FailsInBackward.apply(x) if self.breaks else x)


def _model(zero_stage: int) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(_Twice(), _Twice()).to(DEVICE)
    shard_state(model, list(model), init_device_mesh(DEVICE.type, (2,)), ZeroSettings(zero_stage), True, False)
    return model


def _backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    model(x).float().square().sum().backward()


def _after_failure(zero_stage: int, fails: bool) -> list[Tensor]:
    """Return the gradients of a micro-batch, maybe after the backward of another step has failed."""
    model = _model(zero_stage)
    if fails:
        model[1].breaks = True
        with pytest.raises(ArithmeticError):
            _backward(model, 1)
        model[1].breaks = False
        forget_unfinished(model)
    with accumulating(model, zero_stage):
        _backward(model, 2)
    return [local_part(place.grad).cpu() for place in gradient_places(model, reduced=False).values()]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_a_backward_that_failed_changes_no_later_one(zero_stage: int) -> None:
    for failed, plain in zip(*(run_in_processes(2, _after_failure, zero_stage, f) for f in (True, False)), strict=True):
        assert len(plain) == 4 and all(gradient.dtype == torch.float32 for gradient in plain)
        assert all(map(torch.equal, failed, plain))


def _after_taking(zero_stage: int, takes: bool) -> list[Tensor]:
    """Return reduced gradients of three micro-batches, of which the first one's are maybe held outside meanwhile."""
    model = _model(zero_stage)
    places = gradient_places(model, reduced=False).values()
    with accumulating(model, zero_stage):
        _backward(model, 1)
        if takes:
            held = [place.grad for place in places]
            for place in places:
                place.grad = None
            _backward(model, 2)
            for place, gradient in zip(places, held, strict=True):
                place.add_up()
                local_part(gradient).add_(local_part(place.grad))
                place.grad = gradient
        else:
            _backward(model, 2)
    _backward(model, 3)
    return [local_part(p.grad).cpu() for p in model.parameters()]


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_gradients_can_be_taken_out_and_put_back(zero_stage: int) -> None:
    for taken, plain in zip(*(run_in_processes(2, _after_taking, zero_stage, t) for t in (True, False)), strict=True):
        torch.testing.assert_close(taken, plain, rtol=2e-2, atol=1e-3)  # sums of one micro-batch may be in bf16
