"""Names of the command-line settings, with suggestions for mistyped names."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

_UNKNOWN = re.compile(r"Could not override '(?P<name>[^']+)'")
_NO_VALUE = re.compile(r"Error parsing override '(?P<text>[^']+)'\s+missing EQUAL")


def rewrite_hydra_message(message: str, folder: Path) -> str:
    """Rewrites Hydra's messages about an unknown setting or a missing value; returns other messages unchanged.

    Args:
        message: Hydra's message. For an unknown setting, it advises to append the setting, which is rarely right.
        folder: Folder of the configuration.
    """
    if found := _UNKNOWN.match(message):
        return no_such_setting(found["name"], folder)
    if found := _NO_VALUE.match(message):
        return f"{found['text']}: give SETTING=VALUE; --help lists all settings"
    return message


def check_overrides(overrides: Sequence[str], folder: Path) -> None:
    """Refuses settings that `+NAME=VALUE` appends but nothing reads, and numbers in place of the name of an option.

    Args:
        overrides: Overrides of the command line.
        folder: Folder of the configuration.

    Raises:
        ValueError: No setting and no group has the name. Names inside a known group, for example `+trainer.profiler`,
            are not checked. Or an option of a group is a number.
    """
    groups = {path.name for path in folder.iterdir() if path.is_dir()}
    for override in overrides:
        name, _, value = override.partition("=")
        if name in groups and value.isdigit():
            options = ", ".join(sorted(path.stem for path in (folder / name).glob("*.yaml")))
            raise ValueError(f"{override}: no such {name}; give one of {options}")
        name = name.lstrip("+")
        first = re.split(r"[./@]", name)[0]
        if not override.startswith("+") or first in groups | {"hydra"}:
            continue  # without reading the files, which takes a large part of a second
        if first not in set(_known_names(folder)):
            raise ValueError(no_such_setting(name, folder))


def no_such_setting(name: str, folder: Path) -> str:
    """Returns one line about an unknown name: known ones that end alike or are similar, or the option that has it."""
    group = name.partition(".")[0]
    having = sorted(path.stem for path in (folder / group).glob("*.yaml") if name in _option_settings(path))
    if having:
        return f"{name}: the chosen {group} has no such setting; {group}={having[0]} has it"
    if group == "trainer" and name.partition(".")[2] in _arguments_of_trainer():
        return f"{name}: no setting of its own, but an argument of Trainer: write +{name}=..."
    known = sorted(set(_known_names(folder)) - {name})  # another command may have it
    near = [each for each in known if each.endswith(f".{name}")] or difflib.get_close_matches(name, known, n=1)
    return f"{name}: no such setting; " + (
        f"did you mean {' or '.join(near)}? --help lists all settings" if near else "--help lists all settings"
    )


def _arguments_of_trainer() -> Collection[str]:
    from lightning.pytorch import Trainer  # after a mistake only, as this takes seconds

    return inspect.signature(Trainer).parameters


def _known_names(folder: Path) -> Iterator[str]:
    for path in folder.glob("*.yaml"):
        yield from _dotted(OmegaConf.load(path), "")
    for path in folder.glob("*/*.yaml"):
        if path.parent.name not in ("experiment", "hydra"):
            yield path.parent.name
            yield from _option_settings(path)


def _option_settings(path: Path) -> Iterator[str]:
    return _dotted(OmegaConf.load(path), f"{path.parent.name}.")


def _dotted(settings: object, prefix: str) -> Iterator[str]:
    if isinstance(settings, DictConfig):
        for name in settings:
            if name != "defaults":
                yield f"{prefix}{name}"
                yield from _dotted(settings._get_node(name), f"{prefix}{name}.")
