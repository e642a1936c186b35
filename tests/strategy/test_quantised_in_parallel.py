"""QLoRA in processes that share tokens and weights."""

from __future__ import annotations

import os
from typing import Any

import pytest
from lightning.pytorch import Callback
from strategy.test_quantised import KINDS, Adapters
from support.divided_training import RING, ULYSSES
from support.markers.slow import slow_if
from support.parallel_training import whole
from support.processes import run_in_processes
from support.trainer_harness import fit, loader, plain
from torch import Tensor, nn
from typing_extensions import override

from lightning_memo import MemoStrategy


class WholeGradients(Callback):
    """Keeps the unsharded gradients of the last step."""

    def __init__(self) -> None:
        self.last: dict[str, Tensor] = {}

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.last = {name: whole(p.grad) for name, p in pl_module.named_parameters() if p.grad is not None}


def of_rank(kind: str, settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    def quantise(model: nn.Module) -> None:
        if os.environ["RANK"] != "0":  # the same values of 4 or 8 bits with other scales, which rank 0 has to replace
            for p in model.parameters():
                p.data.mul_(2)
        KINDS[kind](model)

    noted, module = WholeGradients(), Adapters(quantise)
    fit(
        MemoStrategy(**settings), module, loader(tokens=48), callbacks=[noted], devices=2, use_distributed_sampler=False
    )
    return module.losses, noted.last


@slow_if(lambda kind, settings: kind != "bitsandbytes NF4" or settings != RING | {"zero_stage": 3})
@pytest.mark.parametrize("kind", list(KINDS)[:3])
@pytest.mark.parametrize("settings", [RING | {"zero_stage": 3}, ULYSSES | {"zero_stage": 3}, RING])
def test_gradients_of_adapters_are_those_of_one_process(kind: str, settings: dict[str, Any]) -> None:
    noted = WholeGradients()
    losses = plain(Adapters(KINDS[kind]), loader(tokens=48), callbacks=[noted]).losses
    parts = run_in_processes(2, of_rank, kind, settings | {"alpha": 0.5})
    assert [sum(of_step) / 2 for of_step in zip(*(p[0] for p in parts), strict=True)] == pytest.approx(losses, rel=1e-5)
    for _, found in parts:
        assert found.keys() == noted.last.keys()
        for name, expected in noted.last.items():
            assert float((found[name] - expected).norm()) <= 2e-5 * float(expected.norm()), name
