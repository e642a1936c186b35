"""The folder of a sweep: starts a sweep in it, or checks that an earlier sweep can continue there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lightning_memo.cli.run_summary import SUMMARY_FILE, RunSummary

LAST = "last"
_COMMAND_FILE = "multirun.yaml"  # Hydra's record of the sweep's command
_BASIC_SWEEPER = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def prepare_sweep_folder(config: DictConfig) -> None:
    """Prepares the folder of a sweep that starts or continues, and makes the link `last` point to a new folder.

    Args:
        config: Configuration of the sweep, including Hydra's section.

    Raises:
        ValueError: `sweep` has several values, or is `last` without an earlier sweep, or the folder contains the
            results of other jobs.
    """
    folder = Path(config.hydra.sweep.dir)
    overrides = _parsed(config)
    if any(override.get_key_element() == "sweep" and override.is_sweep_override() for override in overrides):
        raise ValueError("sweep: give one name, because all jobs of a sweep share one folder")
    last = folder.with_name(LAST)
    if folder == last:
        if not folder.is_dir():
            raise ValueError(f"sweep={LAST}: no sweep in {folder.parent}; give the name=... of an earlier one")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        if last.is_symlink() or not last.exists():
            _link(last, folder.name)
    if (folder / _COMMAND_FILE).is_file():
        _check_jobs(OmegaConf.load(folder / _COMMAND_FILE), config, folder)


def finished_job(folder: Path) -> RunSummary | None:
    """Returns the summary of a job that has finished successfully, otherwise None."""
    if not (folder / SUMMARY_FILE).is_file():
        return None
    summary = RunSummary.load(folder)
    return summary if summary.status == "ok" else None


def _link(link: Path, target: str) -> None:
    unfinished = link.with_name(f".{LAST}.{target}")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target)
    unfinished.replace(link)


def _check_jobs(earlier: Any, config: DictConfig, folder: Path) -> None:
    """Refuses a sweep that would give the number of an earlier job, which names its folder, to another job."""
    if config.hydra.sweeper._target_ != _BASIC_SWEEPER or earlier.hydra.sweeper._target_ != _BASIC_SWEEPER:
        raise ValueError(
            f"sweep={folder.name}: only sweeps of Hydra's basic sweeper can be continued; start a new sweep"
        )
    before, now = _jobs(earlier), _jobs(config)
    for number, old in enumerate(before):
        new = now[number] if number < len(now) else None
        if old != new:
            was = _differing(old, before if new is None else [new])
            would_be = "missing" if new is None else _differing(new, [old])
            raise ValueError(
                f"sweep={folder.name}: job {number} was {was}, but would now be {would_be}; repeat the same command, "
                "add new values after all earlier ones, or start a new sweep"
            )


def _differing(job: dict[str, str], others: list[dict[str, str]]) -> str:
    """The settings of a job that differ from at least one of the others, as text."""
    names = [name for name in job if any(other.get(name) != job[name] for other in others)]
    return " ".join(f"{name}={job[name]}" for name in names) or "without it"


def _jobs(config: DictConfig) -> list[dict[str, str]]:
    """The settings of each job, in the order of Hydra's basic sweeper."""
    values: dict[str, list[str]] = {}
    for override in _parsed(config):
        name = override.get_key_element()
        swept = override.is_sweep_override()
        values[name] = list(override.sweep_string_iterator()) if swept else [override.get_value_element_as_str()]
    values.pop("sweep", None)
    return [dict(zip(values, job, strict=True)) for job in itertools.product(*values.values())]


def _parsed(config: DictConfig) -> list[Any]:
    params = config.hydra.sweeper.get("params") or {}
    given = [*(f"{name}={value}" for name, value in params.items()), *config.hydra.overrides.task]
    return OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(given)
