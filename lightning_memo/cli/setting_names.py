"""Names of the command lines' settings, and what a mistyped one may have meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

_UNKNOWN = re.compile(r"Could not override '(?P<name>[^']+)'")
_NO_VALUE = re.compile(r"Error parsing override '(?P<text>[^']+)'\s+missing EQUAL")


def explain(message: str, folder: Path) -> str:
    """Returns what to do where Hydra's message is of a name that it does not know or has no value, else the message.

    Args:
        message: Of Hydra, which advises to append what it does not know.
        folder: Of the configuration.
    """
    if found := _UNKNOWN.match(message):
        return no_such_setting(found["name"], folder)
    if found := _NO_VALUE.match(message):
        return f"{found['text']}: give SETTING=VALUE; --help lists all"
    return message


def check_appended(overrides: Sequence[str], folder: Path) -> None:
    """Refuses settings that `+NAME=VALUE` appends where nothing reads them.

    Args:
        overrides: What the command line changes.
        folder: Of the configuration.

    Raises:
        ValueError: No setting and no group has the name. Names below a setting, like `+trainer.profiler`, may be any.
    """
    names = [override.partition("=")[0].lstrip("+") for override in overrides if override.startswith("+")]
    groups = {path.name for path in folder.iterdir() if path.is_dir()}
    known = {name.partition(".")[0] for name in _names(folder)} | groups
    for name in names:
        if re.split(r"[./@]", name)[0] not in known | {"hydra"}:
            raise ValueError(no_such_setting(name, folder))


def no_such_setting(name: str, folder: Path) -> str:
    """Returns one line for a name that is unknown, with the known one that is nearest, or the option that has it."""
    group = name.partition(".")[0]
    having = sorted(path.stem for path in (folder / group).glob("*.yaml") if name in _of_option(path))
    if having:
        return f"{name}: no such setting of the {group} that is chosen; {group}={having[0]} has it"
    near = difflib.get_close_matches(name, sorted(set(_names(folder))), n=1)
    return f"{name}: no such setting; " + (f"did you mean {near[0]}? --help lists all" if near else "--help lists all")


def _names(folder: Path) -> Iterator[str]:
    for path in folder.glob("*.yaml"):
        yield from _dotted(OmegaConf.load(path), "")
    for path in folder.glob("*/*.yaml"):
        if path.parent.name not in ("experiment", "hydra"):
            yield path.parent.name
            yield from _of_option(path)


def _of_option(path: Path) -> Iterator[str]:
    return _dotted(OmegaConf.load(path), f"{path.parent.name}.")


def _dotted(settings: object, prefix: str) -> Iterator[str]:
    if isinstance(settings, DictConfig):
        for name in settings:
            if name != "defaults":
                yield f"{prefix}{name}"
                yield from _dotted(settings._get_node(name), f"{prefix}{name}.")
