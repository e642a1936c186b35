"""TransformerEngine's FP8 beside ZeRO: training is that of plain FSDP2, bit by bit.

In FSDP2's units, its modules quantize the gathered weights again in the backward. With delayed scaling, the scales are
those of the next forward then, and the maxima go into its history.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from support.architectures.fp8_models import InFp8, Scales, blocks_of, engine, manager, recipe_of, scales_in, trained
from support.devices import DEVICE
from support.parallel_training import whole
from support.processes import run_in_processes
from support.trainer_harness import Sequences, make_trainer
from support.transformer_engine_stand_in import stand_in
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_memo import MemoLoop, MemoStrategy
from lightning_memo.parallel.mesh_precision import clip_by_norm
from lightning_memo.parallel.zero_sharding import send_quantised

STEPS, PROCESSES = 3, 2


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        recipe: Name of the recipe.
        stage: ZeRO stage.
        frozen: Whether only the output projections of attention are trained, as with adapters.
        accumulate: Number of batches of an optimizer step.
        clip: Maximum gradient norm; 0 disables clipping.
        precision: Precision of Lightning's trainer.
        loop: Whether a loop of the user's own shards the model, and trains with `MemoLoop`.
        kept: Whether modules keep their quantized weights, as those of release 2.15 do.
        settings: Further arguments of MemoStrategy.
    """

    recipe: str = "delayed"
    stage: int = 3
    frozen: bool = False
    accumulate: int = 1
    clip: float = 0.0
    precision: str = "32-true"
    loop: bool = False
    kept: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def module(self) -> InFp8:
        """Return the model."""
        module = InFp8(recipe_of(self.recipe), blocks_of)
        if self.precision == "bf16-true":
            module.to(torch.bfloat16)
        for name, p in module.named_parameters():
            p.requires_grad_(not self.frozen or ".out." in name)
        if self.kept:
            _keep_quantized(module)
        return module


def _keep_quantized(module: nn.Module) -> None:
    for m in module.modules():
        if isinstance(m, engine().module.base.TransformerEngineBaseModule):
            m._is_fsdp2 = False


class Gradients(Callback):
    """Notes the whole gradients of each optimizer step, before clipping."""

    def __init__(self) -> None:
        self.noted: list[Tensor] = []

    @override
    def on_before_optimizer_step(self, trainer: Any, module: nn.Module, optimizer: Any) -> None:
        self.noted += gradients_of(module)


def gradients_of(module: nn.Module) -> list[Tensor]:
    """Return whole gradients."""
    return [whole(p.grad) for p in module.parameters() if p.grad is not None]


def rows(count: int) -> list[dict[str, Tensor]]:
    """Return this process's rows."""
    sequences, size, rank = Sequences(size_of(count)), dist.get_world_size(), dist.get_rank()
    return [{name: t[None].to(DEVICE) for name, t in sequences[size * n + rank].items()} for n in range(count)]


def size_of(count: int) -> int:
    """Return the number of rows of all processes."""
    return PROCESSES * count


def by_strategy(run: Run, alpha: Any) -> list[Tensor]:
    """Train by the strategy. Returns losses, gradients, weights, scales and histories."""
    module, scales, gradients = run.module(), Scales(), Gradients()
    strategy = MemoStrategy(**{"alpha": alpha, "zero_stage": run.stage, **run.settings})
    trainer = make_trainer(
        strategy,
        devices=dist.get_world_size(),
        callbacks=[scales, gradients],
        max_steps=STEPS,
        accumulate_grad_batches=run.accumulate,
        gradient_clip_val=run.clip or None,
        precision=run.precision,
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(rows(STEPS * run.accumulate), batch_size=None))  # type: ignore[arg-type]
    assert not trainer.strategy.plan.swap.plain
    return noted(module, module.losses, gradients.noted, scales.noted)


def by_loop(run: Run, alpha: Any = None) -> list[Tensor]:
    """Train with FSDP2, and with `MemoLoop` or nothing else. Returns the same."""
    module = run.module().to(DEVICE)
    shard(module, run)
    optimizer, losses, gradients, scales = module.configure_optimizers(), list[float](), list[Tensor](), []
    memo: Any = contextlib.nullcontext()
    if alpha is not None:
        memo = MemoLoop(module.model, optimizer, alpha=alpha)
    with memo:
        _steps(module, optimizer, run, losses, gradients, scales)
        assert alpha is None or not memo.plan.swap.plain
    return noted(module, losses, gradients, scales)


def _steps(module: InFp8, optimizer: Any, run: Run, losses: list, gradients: list, scales: list) -> None:
    for number, batch in enumerate(rows(STEPS * run.accumulate)):
        with engine().autocast(recipe=module.recipe):
            loss = module.model(**batch).loss
        last = (number + 1) % run.accumulate == 0
        module.set_requires_gradient_sync(last or run.stage >= 2)
        (loss / run.accumulate).backward()
        losses.append(loss.item())
        if last:
            gradients += gradients_of(module)
            if run.clip:
                clip_by_norm(list(module.parameters()), run.clip, DEVICE)
            optimizer.step()
            optimizer.zero_grad()
        scales.append(list(scales_in(module)))


def shard(module: InFp8, run: Run) -> None:
    """Make each block a unit of FSDP2, and the rest of the model another one."""
    lower = torch.bfloat16 if run.precision == "bf16-mixed" else None
    policy = MixedPrecisionPolicy(param_dtype=lower, reduce_dtype=torch.float32)
    home = CPUOffloadPolicy(pin_memory=DEVICE.type == "cuda") if run.settings.get("offload_state") else OffloadPolicy()
    assert module.model is not None
    for unit in (*module.model.blocks, module.model, module):
        after = run.stage == 3 and unit in module.model.blocks
        fully_shard(unit, mp_policy=policy, reshard_after_forward=after, offload_policy=home)
        unit.set_force_sum_reduction_for_comms(True)
        if "zero_communication" in run.settings:
            send_quantised(unit, run.settings["zero_communication"])


def noted(module: nn.Module, losses: list[float], gradients: list[Tensor], scales: list[list[Tensor]]) -> list[Tensor]:
    """Return all that is compared, on the CPU."""
    weights = [whole(p) for p in module.parameters()]
    assert gradients and len(scales[-1]) in (0, 48)
    return [t.cpu() for t in (torch.tensor(losses), *gradients, *weights, *(t for each in scales for t in each))]


def train(run: Run, alphas: list[Any]) -> list[list[Tensor]]:
    """Train plainly and by the strategy with some alphas."""
    results = []
    for alpha in (None, *alphas):
        with stand_in():
            manager().reset()
            torch.manual_seed(1)
            results.append(by_loop(run, alpha) if alpha is None or run.loop else by_strategy(run, alpha))
    return results


def compare(run: Run, alphas: list[Any]) -> list[Tensor]:
    """Compare training by the strategy with plain training in two processes."""
    for expected, *others in run_in_processes(PROCESSES, train, run, alphas):
        for found in others:
            assert len(found) == len(expected)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return expected


RUNS: dict[str, tuple[Run, list[Any]]] = {
    "delayed": (Run(), [0.0, 0.5, 1.0]),
    "current": (Run("current"), [0.0, 0.5, 1.0]),
    "blocks": (Run("blocks"), [0.0, 0.5, 1.0]),
    "mxfp8": (Run("mxfp8"), [0.0, 0.5, 1.0]),
    "most recent": (Run("most_recent"), [0.0, 1.0]),
    "unfused": (Run("unfused"), [0.0, 1.0]),
    "auto": (Run(settings={"device_memory": "400KiB"}), ["auto"]),
    "stage 1": (Run(stage=1), [0.0, 0.5, 1.0]),
    "stage 2": (Run(stage=2), [0.0, 0.5, 1.0]),
    "accumulated, stage 1": (Run(stage=1, accumulate=2, clip=0.05), [0.5]),
    "accumulated, stage 2": (Run(stage=2, accumulate=2, clip=0.05), [0.5]),
    "accumulated, stage 3": (Run(accumulate=2, clip=0.05), [0.0, 1.0]),
    "frozen": (Run(frozen=True, accumulate=2), [0.0, 0.5, 1.0]),
    "frozen, current": (Run("current", frozen=True), [0.0, 0.5, 1.0]),
    "2.15": (Run(kept=True), [0.0, 0.5, 1.0]),
    "2.15, stage 2": (Run(kept=True, stage=2), [0.0, 1.0]),
    "loop": (Run(loop=True), [0.0, 0.5, 1.0]),
    "loop, stage 2": (Run(stage=2, accumulate=2, clip=0.05, loop=True), [0.0, 1.0]),
    "mixed": (Run(precision="bf16-mixed"), [0.0, 0.5, 1.0]),
    "true": (Run(precision="bf16-true"), [0.0, 0.5, 1.0]),
    "offloaded": (Run(settings={"offload_state": True}), [0.0, 1.0]),
    "offloaded, mixed, stage 2": (Run(stage=2, precision="bf16-mixed", settings={"offload_state": True}), [0.5]),
    "sent as int8": (Run(settings={"zero_communication": "int8"}), [0.0, 1.0]),
    "planned memory": (Run(settings={"plan_memory": True}), [0.5]),
}
QUICK = {"auto", "accumulated, stage 2"}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_results_are_those_of_plain_fsdp2(case: str) -> None:
    compare(*RUNS[case])


def test_modules_quantize_again_in_the_backward() -> None:
    """Otherwise the comparison with plain FSDP2 would not say much: results are others if they keep their weights."""
    again, kept = (run_in_processes(PROCESSES, train, Run(kept=kept), [])[0][0] for kept in (False, True))
    assert again[0][0] == kept[0][0] and again[0][1] != kept[0][1]


def alone(run: Run) -> list[float]:
    """Train plainly on the rows of all processes in one. Returns the losses."""
    data = DataLoader(Sequences(PROCESSES * STEPS), batch_size=PROCESSES)
    with stand_in():
        return trained(None, run.module(), data, max_steps=STEPS)[0].losses


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "bound"), [("delayed", 1e-3), ("current", 2e-3), ("blocks", 1e-6)])
def test_losses_are_those_of_one_process_up_to_the_rounding_of_fp8(recipe: str, bound: float) -> None:
    """With delayed scaling, the backward has other scales for weights; with current scaling, each process its own."""
    run = Run(recipe)
    every = [found[1][0] for found in run_in_processes(PROCESSES, train, run, [0.5])]
    torch.testing.assert_close(torch.stack(every).mean(0), torch.tensor(alone(run)), rtol=bound, atol=0)
