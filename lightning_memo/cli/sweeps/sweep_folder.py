"""The folder of a sweep: what was done in it before, and whether a command may go on there."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from lightning_memo.cli.run_summary import FILE_NAME, RunSummary

LAST = "last"
_COMMAND = "multirun.yaml"  # Hydra's own record
_BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"


def enter(config: DictConfig) -> None:
    """Lets a sweep begin in a new folder, or go on in one that is there; afterwards, `last` leads to it.

    Args:
        config: Of the whole sweep, with Hydra's part.

    Raises:
        ValueError: `sweep` is several names, or `last` without an earlier sweep; or the folder has other jobs.
    """
    folder = Path(config.hydra.sweep.dir)
    overrides = _parsed(config)
    if any(override.get_key_element() == "sweep" and override.is_sweep_override() for override in overrides):
        raise ValueError("sweep: give one name; all jobs of a sweep lie in its folder")
    last = folder.with_name(LAST)
    if folder == last:
        if not folder.is_dir():
            raise ValueError(f"sweep={LAST}: no sweep in {folder.parent}; give the name=... of an earlier one")
    else:
        folder.mkdir(parents=True, exist_ok=True)
        if last.is_symlink() or not last.exists():
            _link(last, folder.name)
    if (folder / _COMMAND).is_file():
        _check_jobs(OmegaConf.load(folder / _COMMAND), config, folder)


def finished(folder: Path) -> RunSummary | None:
    """Returns what a job left in its folder if it came to its end; one that failed did not."""
    if not (folder / FILE_NAME).is_file():
        return None
    summary = RunSummary.load(folder)
    return summary if summary.status == "ok" else None


def _link(link: Path, target: str) -> None:
    unfinished = link.with_name(f".{LAST}.{target}")
    unfinished.unlink(missing_ok=True)
    unfinished.symlink_to(target)
    unfinished.replace(link)


def _check_jobs(earlier: Any, config: DictConfig, folder: Path) -> None:
    """Refuses jobs whose numbers, which are the names of their folders, were other jobs' before."""
    if config.hydra.sweeper._target_ != _BASIC or earlier.hydra.sweeper._target_ != _BASIC:
        raise ValueError(f"sweep={folder.name}: only sweeps of Hydra's basic sweeper go on; start another one")
    before, now = _jobs(earlier), _jobs(config)
    for number, old in enumerate(before):
        new = now[number] if number < len(now) else None
        if old != new:
            was = _differing(old, before if new is None else [new])
            would_be = "missing" if new is None else _differing(new, [old])
            raise ValueError(
                f"sweep={folder.name}: job {number} was {was}, and would be {would_be}; give the same command, new "
                "values after all of before, or start another sweep"
            )


def _differing(job: dict[str, str], others: list[dict[str, str]]) -> str:
    """The settings of a job that not all of some others have so."""
    names = [name for name in job if any(other.get(name) != job[name] for other in others)]
    return " ".join(f"{name}={job[name]}" for name in names) or "without"


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
