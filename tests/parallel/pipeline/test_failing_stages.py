"""If a step fails on one process of a pipeline, all others end with one line, wherever it fails.

Processes with the same weights wait for each other in the middle of a step with ZeRO 2 and 3, and stages for messages.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from support.devices import DEVICE
from support.parallel_training import Run, train
from support.processes import Group, ProcessError, run_in_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from typing_extensions import override

from lightning_memo.parallel.fsdp_units import UnitsInFlight
from lightning_memo.parallel.pipeline.pipeline_gradients import gradient_places
from lightning_memo.parallel.zero_sharding import ZeroSettings, shard_state

TIMEOUT = 20.0
NO_MEMORY = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 1099511627776 bytes"


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return t.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("the backward fails")


class Fails(Callback):
    """A process fails in the second step, in a micro-batch that is not the first one.

    Args:
        rank: Rank of the process.
        place: Where it fails.
    """

    def __init__(self, rank: int, place: str) -> None:
        self.notes: dict[str, Any] = {}
        self._is_this, self._place, self._calls = dist.get_rank() == rank, place, 0

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if not self._is_this or trainer.global_step != 1:
            return
        if self._place == "loss":
            module.model.loss_function = self._loss(module.model.loss_function)
            return
        own = [layer for layer in module.model.model.layers if any(True for _ in layer.parameters())]
        own[-1].mlp.register_forward_hook(self._after)

    def _loss(self, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fails(*args: Any, **kwargs: Any) -> Tensor:
            self._fail_second(ArithmeticError("the loss fails"))
            return function(*args, **kwargs)

        return fails

    def _after(self, module: nn.Module, args: Any, output: Tensor) -> Any:
        if self._place == "backward":
            return _FailsInBackward.apply(output)
        self._fail_second(ArithmeticError("the forward fails") if self._place == "forward" else RuntimeError(NO_MEMORY))
        return output

    def _fail_second(self, error: Exception) -> None:
        self._calls += 1
        if self._calls == 2:
            raise error


MESSAGES = {"forward": "the forward fails", "loss": "the loss fails", "backward": "the backward fails"}


def _train_and_end(rank: int, place: str, settings: dict[str, Any], told: str) -> None:
    """Say in a file how this process ended, and what it logged, and end, as a script does."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    logging.getLogger("lightning_memo").addHandler(Ear())
    run = Run(family="llama_tied", tokens=45, batch=8, layers=4, steps=3)
    try:
        train(run, settings | {"timeout": timedelta(seconds=TIMEOUT)}, watch=lambda: Fails(rank, place))
    except Exception as error:
        lines = [type(error).__name__, str(error).splitlines()[0], *(line for line in heard if "rank" in line)]
        Path(f"{told}-{dist.get_rank()}").write_text("\n".join(lines))
    os._exit(1)


CASES = [(0, "forward"), (3, "loss"), (2, "backward"), (1, "backward"), (1, "memory"), (2, "memory")]


QUICK = {(0, "forward", 3, 2), (3, "loss", 2, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("zero_stage", [2, 3])
@pytest.mark.parametrize(("rank", "place"), CASES)
def test_a_step_that_fails_on_one_process_ends_all(
    rank: int, place: str, zero_stage: int, blocks: int, tmp_path: Path
) -> None:
    """There are two pipelines of two stages. Ranks 0 and 1 are the first stage."""
    settings = {"pipeline_parallel_size": 2, "virtual_pipeline_size": blocks, "zero_stage": zero_stage, "alpha": 0.5}
    group = Group(4, timeout_seconds=TIMEOUT)
    started = time.monotonic()
    try:
        with pytest.raises(ProcessError):
            group.run(_train_and_end, rank, place, settings, str(tmp_path / "told"))
    finally:
        group.stop()
    assert time.monotonic() - started < 2 * TIMEOUT
    for other in range(4):
        kind, message, *lines = (tmp_path / f"told-{other}").read_text().splitlines()
        if other == rank:
            expected = ("RuntimeError", NO_MEMORY) if place == "memory" else ("ArithmeticError", MESSAGES[place])
            assert (kind, message) == expected and lines == []
        else:
            (line,) = lines
            assert line.startswith(f"rank {other} lost another process of the run")


class _Net(nn.Module):
    """Layers between two others; the backward fails below the last layer if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.breaks = False

    @override
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, layer in enumerate(self.layers):
            x = layer(_FailsInBackward.apply(x) if self.breaks and number == 3 else x)
        return self.head(x)


def _gradients(zero_stage: int, fails: bool) -> list[Tensor]:
    """Return the gradients of two micro-batches, after the backward of another one has failed on all processes."""
    torch.manual_seed(0)
    model = nn.Sequential(_Net()).to(DEVICE)
    mesh = init_device_mesh(DEVICE.type, (2,))
    shard_state(model, list(model[0].layers), mesh, ZeroSettings(zero_stage), False, False)
    units, places = UnitsInFlight(model, zero_stage), gradient_places(model, reduced=True).values()
    inputs = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to(DEVICE)

    def run(x: Tensor) -> tuple[Tensor, list[Any]]:
        return model[0](x).square().sum(), units.take_forward()

    with units.accumulating():
        first, second = run(inputs[0]), run(inputs[1])
        if fails:
            model[0].breaks = True
            broken, forward = run(inputs[2])
            model[0].breaks = False
            with pytest.raises(ArithmeticError), units.backward(forward):
                broken.backward()
            for place in places:
                place.grad = None
        for loss, forward in (first, second):
            with units.backward(forward):
                loss.backward()
    return [place.grad.full_tensor().cpu() for place in places]


@pytest.mark.parametrize("zero_stage", [2, 3])
def test_after_a_backward_that_fails_others_are_right(zero_stage: int) -> None:
    """FSDP2 neither takes the units for those of the failed backward, nor uses what was gathered for it."""
    for failed, plain in zip(*(run_in_processes(2, _gradients, zero_stage, f) for f in (True, False)), strict=True):
        assert len(failed) == 12
        torch.testing.assert_close(failed, plain)
