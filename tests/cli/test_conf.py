"""Every option of every group of the configuration can be composed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from support.commands import composed

from lightning_memo.cli.hydra_command import config_dir, plain_settings
from lightning_memo.cli.restarts import register_run_folder
from lightning_memo.cli.runs.build_run import build_strategy
from lightning_memo.models import ModelConfig, load_hf_config

GROUPS = ("model", "data", "strategy", "trainer", "callbacks", "logger", "experiment")
CHOICES = [(group, path.stem) for group in GROUPS for path in sorted(Path(config_dir(), group).glob("*.yaml"))]


def test_groups_are_those_of_the_documentation() -> None:
    folders = {path.name for path in Path(config_dir()).iterdir() if path.is_dir()}
    assert folders == {*GROUPS, "cluster", "hydra", "paths"}


@pytest.mark.parametrize(("group", "choice"), CHOICES, ids=lambda part: part)
def test_choices_compose(group: str, choice: str, tmp_path: Path) -> None:
    cfg = composed("train", f"{group}={choice}", f"paths.output_dir={tmp_path}")
    OmegaConf.resolve(cfg)
    if cfg.model.config is not None:
        load_hf_config(ModelConfig(**plain_settings(cfg.model)))
    build_strategy(cfg.strategy)
    for each in (*cfg.callbacks.values(), *cfg.logger.values()):
        instantiate(each)


@pytest.mark.parametrize("path", sorted(Path(config_dir(), "cluster").glob("*.yaml")), ids=lambda path: path.stem)
def test_clusters_compose(path: Path) -> None:
    cfg = composed("estimate", f"cluster={path.stem}")
    assert cfg.cluster.name == path.stem


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    register_run_folder()
    cfg = OmegaConf.create({"hydra": {"overrides": {"task": []}}, "dir": f"${{run_folder:{tmp_path},now}}"})
    Path(tmp_path, "now").mkdir()
    assert cfg.dir == f"{tmp_path}/now-2"
    Path(cfg.dir).mkdir()
    assert cfg.dir == f"{tmp_path}/now-2", "the same run asks again"
