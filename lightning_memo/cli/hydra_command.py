"""Common parts of the Hydra commands: the configuration folder, and one-line messages for users' mistakes."""

from __future__ import annotations

import difflib
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, InstantiationException, OverrideParseException
from omegaconf import DictConfig, OmegaConf

from lightning_memo import __version__
from lightning_memo.cli.processes import delay_unless_rank_zero
from lightning_memo.cli.run_folder import register_run_folder
from lightning_memo.config import GONE
from lightning_memo.utils.user_errors import is_own_refusal, misconfiguration_errors, one_line, user_message

USER_ERROR_EXIT = 2
_HYDRA_KEYS = ("_target_", "defaults")
_SETTING = re.compile(r"[a-z_]+[=:]")

_UNKNOWN = re.compile(r"Could not override '(?P<name>[^']+)'")
_ABOUT = 0.05
_NO_OPTION = re.compile(r"(?:In '[^']*': )?Could not find '(?P<group>\w+)/(?P<value>[^']+)'")


def config_dir() -> str:
    """Returns the folder of the Hydra configuration: inside an installed package, next to the package in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return str(next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()))


def plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """Returns a section of the configuration as plain data, without Hydra's own keys.

    Raises:
        omegaconf.errors.OmegaConfBaseException: A value is missing, or refers to a setting that does not exist.
    """
    settings = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(settings, dict)
    return {str(name): value for name, value in settings.items() if name not in _HYDRA_KEYS}


def run_command(command: Callable[[], None]) -> None:
    """Runs a Hydra command. A user's mistake ends the command with one line on stderr and exit status 2.

    A process that lost another one has said so in one line, and ends with status 1; one whose output nobody reads any
    more does so without a line. All other exceptions are bugs and keep their tracebacks.
    """
    if "--version" in sys.argv[1:]:  # Hydra would tell its own
        print(f"lightning-memo {__version__}")  # noqa: T201
        return
    # Otherwise Hydra prints several lines of its own for bugs and mistakes alike, and exits with status 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register_run_folder()
    try:
        _check_overrides(sys.argv[1:], Path(config_dir()))
        command()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout once more at its end
        raise SystemExit(1) from None
    except Exception as error:
        exit_for_user(error)
        ranks = sys.modules.get("lightning_memo.parallel.ranks")
        if ranks is not None and ranks.comes_from_lost_process(error):
            raise SystemExit(1) from None
        raise
    _leave_process_group()


def _leave_process_group() -> None:
    """Ends the process group after a command that succeeded.

    Otherwise Gloo's threads may still hold tensors while the interpreter ends, which rarely aborts the process
    (https://github.com/pytorch/pytorch/pull/179291). After a failure, other processes may wait in a collective.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def exit_for_user(error: BaseException) -> None:
    """Ends the process with one line if ``error`` is a user's mistake; otherwise returns.

    If several processes meet the same mistake, only rank zero prints the line.

    Raises:
        SystemExit: The error is a user's mistake; the status is 2.
    """
    message = command_error_message(error)
    if message is not None:
        delay_unless_rank_zero()
        print(f"error: {message}", file=sys.stderr)  # noqa: T201
        raise SystemExit(USER_ERROR_EXIT)


def command_error_message(error: BaseException) -> str | None:
    """Returns one line for the user if ``error`` is a mistake in settings or input, or None if it is a bug.

    Extends :func:`~lightning_memo.utils.user_errors.user_message` by Hydra's and submitit's exceptions.
    """
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        cause = error.__cause__
        # The arguments come from the configuration, so wrong names and values are always the user's mistake.
        from_settings = isinstance(cause, (TypeError, ValueError, ImportError, *misconfiguration_errors()))
        section = str(error).rpartition("full_key: ")[2].strip()
        return _with_section(section, _shortened(cause)) if from_settings else None
    if type(error).__module__.partition(".")[0] == "submitit":  # SLURM killed a job: memory, time limit or a lost node
        return (
            f"{str(error).splitlines()[0]}: SLURM ended the job; when all other jobs have ended, continue with the "
            "same command and sweep=last"
        )
    return _shortened(error) if isinstance(error, HydraException) else user_message(error)


@contextmanager
def settings_of(section: str) -> Iterator[None]:
    """Inside the block, messages about arguments name the settings of a section instead: `data.path` for `path`.

    Raises:
        ValueError: The block raised a ``ValueError`` of this package.
    """
    try:
        yield
    except ValueError as error:
        if not is_own_refusal(error):
            raise
        raise ValueError(_with_section(section, str(error))) from error


def _with_section(section: str, message: str) -> str:
    """Prefixes a message with the section of the configuration, unless the message already begins with it."""
    if message.startswith(section):
        return message
    return f"{section}.{message}" if _SETTING.match(message) else f"{section}: {message}"


def _shortened(error: BaseException) -> str:
    if isinstance(error, OverrideParseException):
        return one_line(_unreadable(error.override))
    text = str(error).partition("Config search path")[0]  # Hydra's search path does not help to choose an option
    if isinstance(error, HydraException):
        text = _rewrite_hydra_message(text, Path(config_dir()))
    return one_line(text)


def _unreadable(override: str) -> str:
    """Returns the message about an argument that Hydra's grammar does not allow."""
    name, equal, value = override.partition("=")
    if not equal:
        return f"{override}: give SETTING=VALUE; --help lists all settings"
    value = value.strip("=\"' ")
    return (
        f"{override}: cannot be read; a value with special characters needs two kinds of quotes: '{name}=\"{value}\"'"
    )


def _rewrite_hydra_message(message: str, folder: Path) -> str:
    """Rewrites Hydra's messages about an unknown setting or option; returns others unchanged.

    Args:
        message: Hydra's message. For an unknown setting, it advises to append the setting, which is rarely right.
        folder: Folder of the configuration.
    """
    if found := _UNKNOWN.match(message):
        return _no_such_setting(found["name"], folder)
    if (found := _NO_OPTION.match(message)) and (folder / found["group"]).is_dir():
        return _no_such_option(found["group"], found["value"], folder)
    return message


def _check_overrides(overrides: Sequence[str], folder: Path) -> None:
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
            raise ValueError(_no_such_option(name, value, folder))
        name = name.lstrip("+")
        first = re.split(r"[./@]", name)[0]
        if not override.startswith("+") or first in groups | {"hydra"}:
            continue  # without reading the files, which takes a large part of a second
        if first not in set(_known_names(folder)):
            raise ValueError(_no_such_setting(name, folder))


def _no_such_option(group: str, value: str, folder: Path) -> str:
    """Returns one line about an unknown option of a group: those that contain its name or are similar, and all."""
    options = sorted(path.stem for path in (folder / group).glob("*.yaml"))
    name = value.lower()
    near = [each for each in options if name in each] or difflib.get_close_matches(name, options, n=2)
    meant = f"did you mean {' or '.join(near)}? All are" if near else "give one of"
    return f"{group}={value}: no such {group}; {meant} {', '.join(options)}"


def _no_such_setting(name: str, folder: Path) -> str:
    """Returns one line about an unknown name: known ones that end alike or are similar, or the option that has it."""
    group, _, setting = name.partition(".")
    if (gone := setting if group == "strategy" else name) in GONE:
        return f"{name}: no setting any more: {GONE[gone]}"
    having = sorted(path.stem for path in (folder / group).glob("*.yaml") if name in _option_settings(path))
    if having:
        return f"{name}: the chosen {group} has no such setting; {group}={having[0]} has it"
    if group == "trainer" and setting in _arguments_of_trainer():
        return f"{name}: no setting of its own, but an argument of Trainer: write +{name}=..."
    known = sorted(set(_known_names(folder)) - {name})  # another command may have it
    near = [each for each in known if each.endswith(f".{name}")] or _nearest(name, known)
    return f"{name}: no such setting; " + (
        f"did you mean {' or '.join(near)}? --help lists all settings" if near else "--help lists all settings"
    )


def _nearest(name: str, known: Sequence[str]) -> list[str]:
    """Returns the known names that are about as similar to a name as the most similar one, if any are."""
    near = difflib.get_close_matches(name, known, n=3)
    likeness = [difflib.SequenceMatcher(None, each, name).ratio() for each in near]
    return [each for each, like in zip(near, likeness, strict=True) if like > likeness[0] - _ABOUT]


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
        for name in map(str, settings):
            if name != "defaults":
                yield f"{prefix}{name}"
                yield from _dotted(settings._get_node(name), f"{prefix}{name}.")
