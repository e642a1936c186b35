"""Checkpoints and exports of pipelines: any other sizes go on where the run stopped, Adam state included."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from support.parallel_training import Outcome, Run, train, train_alone
from support.processes import run_in_processes
from support.trainer_harness import LanguageModel
from transformers import AutoModelForCausalLM

SAVED_AFTER = 2
SIZES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "pp2 v2": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}),
    "pp2 v2 x dp2 zero1": (4, {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2, "zero_stage": 1}),
    "pp3": (3, {"pipeline_parallel_size": 3, "pipeline_layers": [1, 2, 1]}),
    "one": (1, {}),
    "dp2": (2, {"zero_stage": 3}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2 x dp2 zero1": (4, {"pipeline_parallel_size": 2, "zero_stage": 1}),
    "pp2 x dp2 zero3": (4, {"pipeline_parallel_size": 2, "zero_stage": 3}),
    "pp2 x tp2": (4, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}),
    "pp2 x cp2": (4, {"pipeline_parallel_size": 2, "context_parallel_size": 2}),
}
CHAINS = [
    ("pp2", "one"), ("one", "pp2"), ("pp2", "pp3"), ("pp2", "dp2"), ("dp2", "pp2"), ("pp2", "pp2"),
    ("pp2 x dp2 zero1", "pp2 x tp2"), ("pp2 x tp2", "pp2 x cp2"), ("pp2 x cp2", "pp2 x dp2 zero1"),
    ("pp2 v2", "one"), ("one", "pp2 v2"), ("pp2 v2", "pp2"), ("pp3", "pp2 v2"), ("pp2 v2", "dp2"), ("dp2", "pp2 v2"),
    ("one", "pp2 v2 x dp2 zero1"), ("pp2 v2 x dp2 zero1", "pp2 v2"),
    ("pp2 x tp2", "one"), ("one", "pp2 x dp2 zero1"), ("tp2", "pp2 x tp2"),
    ("pp2 x dp2 zero3", "one"), ("dp2", "pp2 x dp2 zero3"), ("pp2 x dp2 zero3", "pp2 x dp2 zero1"),
]  # fmt: skip


def _run_of(family: str, precision: str = "32-true") -> Run:
    return Run(family=family, tokens=45, batch=4, clip=0.5, steps=4, layers=4, precision=precision)


def _train(family: str, sizes: str, checkpoint: str, resume: bool, precision: str = "32-true") -> Outcome:
    run, settings = _run_of(family, precision), SIZES[sizes][1] | {"alpha": 0.5}
    if resume:
        return train(run, settings, ckpt_path=f"{checkpoint}/saved-step={SAVED_AFTER}.ckpt", skip=SAVED_AFTER)
    saving = ModelCheckpoint(
        dirpath=checkpoint, filename="saved-{step}", every_n_train_steps=SAVED_AFTER, save_top_k=-1
    )
    return train(run, settings, callbacks=[saving])


def _losses(family: str, sizes: str, checkpoint: Path, resume: bool, precision: str = "32-true") -> list[float]:
    size = SIZES[sizes][0]
    outcomes: list[Outcome] = run_in_processes(size, _train, family, sizes, str(checkpoint), resume, precision)
    return [sum(losses) / size for losses in zip(*(o.losses for o in outcomes), strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_tied", "llama_gqa"])
@pytest.mark.parametrize(("of", "to"), CHAINS)
def test_goes_on_with_other_sizes(family: str, of: str, to: str, tmp_path: Path) -> None:
    _losses(family, of, tmp_path, resume=False)
    resumed = _losses(family, to, tmp_path, resume=True)  # whose first batch is profiled again
    assert resumed == pytest.approx(train_alone(_run_of(family)).losses[SAVED_AFTER:], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("of", "to"), [("pp2", "one"), ("one", "pp2 v2"), ("pp2", "dp2"), ("pp2", "pp2 x dp2 zero1")])
def test_goes_on_in_mixed_precision(of: str, to: str, tmp_path: Path) -> None:
    """Weights and the state of Adam are in fp32; processes round other numbers to bf16."""
    whole = _losses("llama_tied", of, tmp_path, resume=False, precision="bf16-mixed")
    resumed = _losses("llama_tied", to, tmp_path, resume=True, precision="bf16-mixed")
    assert resumed == pytest.approx(whole[SAVED_AFTER:], rel=1e-4)


def _export(family: str, sizes: str, folder: str) -> Outcome:
    def export(trainer: Any) -> dict[str, Any]:
        trainer.strategy.save_pretrained(folder)
        return {}

    return train(_run_of(family), SIZES[sizes][1] | {"alpha": 0.5}, export)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama_gqa", "llama_tied"])
@pytest.mark.parametrize("sizes", ["pp2", "pp2 v2", "pp2 x tp2", "pp2 x dp2 zero1", "pp2 x dp2 zero3"])
def test_a_trained_model_is_exported(sizes: str, family: str, tmp_path: Path) -> None:
    outcomes: list[Outcome] = run_in_processes(SIZES[sizes][0], _export, family, sizes, str(tmp_path / "model"))
    trained = {name.removeprefix("model."): t for outcome in outcomes for name, t in outcome.weights.items()}
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert exported.keys() == trained.keys()
    assert all(torch.equal(exported[name], t) for name, t in trained.items())


Groups = Callable[[LanguageModel], list[dict[str, Any]]]
_plain = LanguageModel.configure_optimizers


def _by_name(module: LanguageModel) -> list[dict[str, Any]]:
    return [{"params": [p for _, p in sorted(module.named_parameters(), key=lambda pair: pair[0])]}]


def _by_place(module: LanguageModel) -> list[dict[str, Any]]:
    """Groups of the embedding, the layers and the head, with other learning rates; a tied head is the embedding."""
    every = dict(module.named_parameters())
    places = {"embed_tokens": 1e-3, "layers": 4e-3, "lm_head": 1e-3, "model.norm": 8e-3}
    return [{"params": [p for name, p in every.items() if part in name], "lr": lr} for part, lr in places.items()]


def _by_place_if_any(module: LanguageModel) -> list[dict[str, Any]]:
    return [group for group in _by_place(module) if group["params"]]


def _train_groups(groups: Groups, family: str, sizes: str, checkpoint: str, resume: bool) -> str | list[float]:
    """Train with an optimizer of these groups, and return the losses, or the error."""

    def optimizer(module: LanguageModel) -> torch.optim.Optimizer:
        settings = _plain(module).defaults
        return torch.optim.AdamW(groups(module), **{name: settings[name] for name in ("lr", "eps", "weight_decay")})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LanguageModel, "configure_optimizers", optimizer)
        try:
            return _train(family, sizes, checkpoint, resume).losses
        except ValueError as error:
            return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["pp2", "pp2 v2"])
def test_an_optimizer_in_another_order_is_refused_where_states_have_numbers(to: str, tmp_path: Path) -> None:
    run_in_processes(1, _train_groups, _by_name, "llama_gqa", "one", str(tmp_path), False)
    errors = run_in_processes(2, _train_groups, _by_name, "llama_gqa", to, str(tmp_path), True)
    assert all("in another order than the model, so that the stages of a pipeline cannot tell" in e for e in errors)


@pytest.mark.slow
@pytest.mark.parametrize("to", ["pp2", "one"])
def test_an_optimizer_in_another_order_goes_on_where_states_have_names(to: str, tmp_path: Path) -> None:
    losses = run_in_processes(2, _train_groups, _by_name, "llama_gqa", "pp2", str(tmp_path), False)[0]
    for resumed in run_in_processes(SIZES[to][0], _train_groups, _by_name, "llama_gqa", to, str(tmp_path), True):
        assert resumed == pytest.approx(losses[SAVED_AFTER:], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("of", "to"), [("pp2", "one"), ("one", "pp2"), ("pp2", "pp2 v2")])
def test_groups_go_on_with_their_settings(of: str, to: str, tmp_path: Path) -> None:
    """The last stage has the tied head in the group that is empty in one process."""
    losses = run_in_processes(SIZES[of][0], _train_groups, _by_place, "llama_tied", of, str(tmp_path), False)[0]
    for resumed in run_in_processes(SIZES[to][0], _train_groups, _by_place, "llama_tied", to, str(tmp_path), True):
        assert resumed == pytest.approx(losses[SAVED_AFTER:], rel=1e-5)


class AddsGroups(Callback):
    """Adds a group to the optimizer of the first stage, and changes the settings of another one there."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        groups, later = trainer.optimizers[0].param_groups, trainer.is_global_zero and batch_idx == 1
        if later and len(groups) == 1:
            trainer.optimizers[0].add_param_group({"params": [groups[0]["params"].pop()], "lr": 0.5})
            groups[0]["lr"] = 2e-3


def _add_groups(checkpoint: str) -> tuple[list[str], list[dict[str, Any]]]:
    saving = ModelCheckpoint(dirpath=checkpoint, filename="saved-{step}", every_n_train_steps=2, save_top_k=-1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(_run_of("llama_gqa"), SIZES["pp2"][1], callbacks=[AddsGroups(), saving])
    lines = [str(each.message) for each in caught if "differ between the stages" in str(each.message)]
    saved = dcp.state_dict_loader._load_state_dict_from_keys(checkpoint_id=f"{checkpoint}/saved-step=2.ckpt")
    return lines, saved["optimizer_0"]["param_groups"]


@pytest.mark.slow
def test_groups_that_stages_add_later_are_saved(tmp_path: Path) -> None:
    (lines, groups), _ = run_in_processes(2, _add_groups, str(tmp_path))
    assert [group["lr"] for group in groups] == [2e-3, 0.5] and len(groups[1]["params"]) == 1
    assert lines and all("lr of group 0 of the optimizer differ between the stages" in line for line in lines)


def test_stages_with_other_groups_are_refused_in_one_line(tmp_path: Path) -> None:
    errors = run_in_processes(2, _train_groups, _by_place_if_any, "llama_gqa", "pp2", str(tmp_path), False)
    assert all("groups differ between stages (rank 0: 2 groups, lr 0.001, 0.004; rank 1: 3 groups" in e for e in errors)
    assert not any("\n" in e for e in errors)
