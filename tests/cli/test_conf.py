"""Every option of every group of the configuration can be composed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf
from support.commands import composed

from lightning_memo.cli.build_run import build_strategy
from lightning_memo.cli.hydra_command import config_dir, plain_settings
from lightning_memo.cli.run_folder import Launch, _new_folder, register_run_folder
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


def new_folder(runs: Path) -> str:
    """The folder that a run of another process gets, which has resolved nothing before."""
    _new_folder.cache_clear()
    cfg = OmegaConf.create({"hydra": {"overrides": {"task": []}}, "dir": f"${{run_folder:{runs},now}}"})
    folder = str(cfg.dir)
    assert cfg.dir == folder, "the same run asks again"
    return folder


def test_runs_that_begin_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    """No run has to write anything before the next one asks."""
    register_run_folder()
    runs = tmp_path / "runs"
    assert [new_folder(runs) for _ in range(3)] == [f"{runs}/{name}" for name in ("now", "now-2", "now-3")]


def test_two_launches_in_the_same_second_have_folders_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_run_folder()
    folders = []
    for job in ("7", "8"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        folders.append(new_folder(tmp_path))
        launch = Launch.here([])
        assert launch is not None
        launch.save(Path(folders[-1]))
    assert folders == [f"{tmp_path}/now", f"{tmp_path}/now-2"]
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert new_folder(tmp_path) == f"{tmp_path}/now", "SLURM restarted the first one"


def test_a_folder_that_cannot_be_created_is_left_to_hydra(tmp_path: Path) -> None:
    """Which names the file that is in its place; OmegaConf would not."""
    register_run_folder()
    (tmp_path / "runs").touch()
    assert new_folder(tmp_path / "runs") == f"{tmp_path}/runs/now"
