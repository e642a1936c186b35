"""A run's checkpoint goes on in another topology where it stopped, Adam state included."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support.devices import skip_ring_on_cuda
from support.markers.slow import slow_if
from support.parallel_training import Outcome, Run, train, train_alone
from support.processes import run_in_processes
from transformers import AutoModelForCausalLM

RUN = Run(family="llama_gqa", tokens=45, batch=4, clip=0.5, steps=4, layers=3)
SAVED_AFTER = 2
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "cp2 x tp2": (4, {"context_parallel_size": 2, "tensor_parallel_size": 2}),
    "dp2 x cp2": (4, {"context_parallel_size": 2}),
    "dp2 zero3": (2, {"zero_stage": 3}),
    "dp2 zero0": (2, {"zero_stage": 0}),
    "one": (1, {}),
}

QUICK = {("dp2 zero3", "dp2 zero3"), ("dp2 zero3", "one")}


def _train(topology: str, checkpoint: str, resume: bool) -> Outcome:
    """Train all steps and save after some of them, or go on from there."""
    settings = TOPOLOGIES[topology][1] | {"alpha": 0.5}
    saving = ModelCheckpoint(
        dirpath=checkpoint, filename="saved-{step}", every_n_train_steps=SAVED_AFTER, save_top_k=-1
    )
    if resume:
        return train(RUN, settings, ckpt_path=f"{checkpoint}/saved-step={SAVED_AFTER}.ckpt", skip=SAVED_AFTER)
    return train(RUN, settings, callbacks=[saving])


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Outcome, Path]]:
    """Trains in a topology, once; returns the outcome, and where the checkpoint is."""

    @functools.cache
    def trained(topology: str) -> tuple[Outcome, Path]:
        folder = tmp_path_factory.mktemp("checkpoints")
        return train_as(topology, folder), folder

    return trained


@functools.cache
def losses_alone() -> list[float]:
    return train_alone(RUN).losses


def train_as(topology: str, checkpoint: Path, resume: bool = False) -> Outcome:
    size, settings = TOPOLOGIES[topology]
    skip_ring_on_cuda(settings)
    outcomes = run_in_processes(size, _train, topology, str(checkpoint), resume)
    first: Outcome = outcomes[0]
    first.losses = [sum(losses) / size for losses in zip(*(o.losses for o in outcomes), strict=True)]
    return first


def _export(settings: dict[str, Any], folder: str) -> Outcome:
    def export(trainer: Any) -> dict[str, Any]:
        trainer.strategy.save_pretrained(folder)
        return {}

    return train(RUN, settings, export)


@slow_if(lambda topology: topology != "dp2 zero3")
@pytest.mark.parametrize("topology", ["cp2 x tp2", "dp2 zero3", "one"])
def test_a_trained_model_is_exported(topology: str, tmp_path: Path) -> None:
    size, settings = TOPOLOGIES[topology]
    skip_ring_on_cuda(settings)
    trained = run_in_processes(size, _export, settings, str(tmp_path / "model"))[0].weights
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert exported.keys() == {name.removeprefix("model.") for name in trained}
    assert all(torch.equal(exported[name.removeprefix("model.")], t.cpu()) for name, t in trained.items())


@pytest.mark.slow
@pytest.mark.parametrize("to", TOPOLOGIES)
@pytest.mark.parametrize("of", ["cp2 x tp2", "one", "dp2 zero3"])
def test_goes_on_in_another_topology(uninterrupted: Any, of: str, to: str) -> None:
    whole, checkpoint = uninterrupted(of)
    resumed = train_as(to, checkpoint, resume=True)
    if of == to:
        assert resumed.losses == whole.losses[SAVED_AFTER:]
        assert all(torch.equal(t, whole.weights[name]) for name, t in resumed.weights.items())
    for mine, reference in zip(resumed.losses, losses_alone()[SAVED_AFTER:], strict=True):
        assert mine == pytest.approx(reference, rel=1e-6)
