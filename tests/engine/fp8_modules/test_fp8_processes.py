"""Data-parallel processes reduce the maxima of TransformerEngine's histories as in plain data-parallel training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.architectures.fp8_models import InFp8, Scales, blocks_of, engine, recipe_of, recipes, scales_in
from support.devices import DEVICE
from support.parallel_training import whole
from support.processes import run_in_processes
from support.trainer_harness import Sequences, make_trainer
from support.transformer_engine_stand_in import stand_in
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from lightning_memo import MemoStrategy

STEPS = 3
Noted = tuple[list[float], list[list[Tensor]]]


def _batches() -> list[dict[str, Tensor]]:
    """Return this process's rows."""
    sequences, size, rank = Sequences(2 * STEPS), dist.get_world_size(), dist.get_rank()
    return [{name: t[None] for name, t in sequences[size * n + rank].items()} for n in range(STEPS)]


def _train(alpha: float | None) -> Noted:
    """Train by the strategy, or plainly if `alpha` is `None`. Returns losses, and scales and histories of each step."""
    with stand_in():
        return _plainly() if alpha is None else _by_strategy(alpha)


def _by_strategy(alpha: float) -> Noted:
    module, scales = InFp8(recipe_of("delayed")), Scales()
    strategy = MemoStrategy(alpha=alpha)
    trainer = make_trainer(
        strategy, devices=dist.get_world_size(), callbacks=[scales], max_steps=STEPS, use_distributed_sampler=False
    )
    trainer.fit(module, DataLoader(_batches(), batch_size=None))  # type: ignore[arg-type]
    return module.losses, scales.noted


def _plainly() -> Noted:
    module = InFp8(recipe_of("delayed"))
    model = DistributedDataParallel(module.to(DEVICE).model)
    optimizer, losses, noted = module.configure_optimizers(), [], []
    for batch in _batches():
        with engine().autocast(recipe=module.recipe):
            loss = model(**{name: t.to(DEVICE) for name, t in batch.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        noted.append(list(scales_in(module)))
    return losses, noted


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_data_parallel_processes_have_the_scales_of_plain_training(alpha: float) -> None:
    expected = run_in_processes(2, _train, None)
    found = run_in_processes(2, _train, alpha)
    for (losses, scales), (plain_losses, plain_scales) in zip(found, expected, strict=True):
        assert losses == pytest.approx(plain_losses, rel=1e-6)
        for step, plain_step in zip(scales, plain_scales, strict=True):
            assert len(step) == len(plain_step) == 12 * 4
            for t, known in zip(step, plain_step, strict=True):
                torch.testing.assert_close(t, known, rtol=1e-5, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(found[0][1][-1], found[1][1][-1], strict=True))


def _alone() -> list[list[Tensor]]:
    """Train without the other process's rows: histories are others then, so that the comparison means something."""
    with stand_in():
        module, scales = InFp8(recipes().DelayedScaling(amax_history_len=4, reduce_amax=False), blocks_of), Scales()
        strategy = MemoStrategy(alpha=0.0)
        trainer = make_trainer(
            strategy, devices=dist.get_world_size(), callbacks=[scales], max_steps=1, use_distributed_sampler=False
        )
        trainer.fit(module, DataLoader(_batches(), batch_size=None))  # type: ignore[arg-type]
        return scales.noted


def test_processes_that_reduce_nothing_have_histories_of_their_own() -> None:
    first, second = run_in_processes(2, _alone)
    assert not all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))


def _run(stage: int, max_steps: int, ckpt_path: str | None, save_to: str | None) -> tuple[list[float], list[Tensor]]:
    """Train on one batch, as Lightning starts a loader from its beginning. Returns losses, and weights and scales."""
    with stand_in():
        module = InFp8(recipe_of("delayed"))
        strategy = MemoStrategy(alpha=0.0, zero_stage=stage)
        trainer = make_trainer(
            strategy, devices=dist.get_world_size(), max_steps=max_steps, use_distributed_sampler=False
        )
        loader = DataLoader(_batches()[:1] * max_steps, batch_size=None)  # type: ignore[arg-type]
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=False)
        if save_to is not None:
            trainer.save_checkpoint(save_to)
        return module.losses, [*map(whole, module.parameters()), *scales_in(module)]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_processes_resume_with_the_scales_of_their_checkpoint(tmp_path: Path, stage: int) -> None:
    """They are extra states, whose sizes are others in a new model."""
    path = str(tmp_path / "two.ckpt")
    expected = run_in_processes(2, _run, stage, 4, None, None)
    saved = run_in_processes(2, _run, stage, 2, None, path)
    resumed = run_in_processes(2, _run, stage, 4, path, None)
    for (losses, state), (plain_losses, plain_state) in zip(resumed, expected, strict=True):
        assert losses == plain_losses[2:]
        assert all(torch.equal(a, b) for a, b in zip(state, plain_state, strict=True))
    _, state = run_in_processes(1, _run, 0, 2, path, None)[0]  # no step is left
    assert len(state) > 12 * 4
    assert all(torch.equal(a, b) for a, b in zip(state, saved[0][1], strict=True))
