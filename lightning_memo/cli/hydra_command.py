"""What the command lines share: where the configuration lies, and errors that people can act on."""

import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lightning_memo.cli.launch import let_the_first_speak
from lightning_memo.cli.restarts import use_run_folder
from lightning_memo.cli.setting_names import check_appended, explain

USER_ERROR_EXIT = 2
_HYDRAS_OWN = ("_target_", "defaults")
_SETTING = re.compile(r"[a-z_]+[=:]")
_LONGEST_MESSAGE = 600  # libraries list all that they know


def config_dir() -> str:
    """Returns the folder of the Hydra configuration: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    return str(next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()))


def plain_settings(cfg: DictConfig) -> dict[str, Any]:
    """Returns a section of the configuration as plain data, without Hydra's own keys.

    Raises:
        OmegaConfBaseException: A value is missing, or refers to nothing.
    """
    settings = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    assert isinstance(settings, dict)
    return {str(name): value for name, value in settings.items() if name not in _HYDRAS_OWN}


def run_command(command: Callable[[], None]) -> None:
    """Runs a Hydra command; a user's mistake ends it with one line on stderr and exit status 2.

    All other exceptions are bugs and keep their tracebacks.
    """
    # Hydra else prints several lines of its own, for bugs and mistakes alike, and ends with status 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    use_run_folder()
    try:
        check_appended(sys.argv[1:], Path(config_dir()))
        command()
    except Exception as error:
        exit_for_user(error)
        raise


def exit_for_user(error: BaseException) -> None:
    """Ends the process with one line where ``error`` is a user's mistake; else returns.

    Of several processes with the same mistake, only the first gets to print it.

    Raises:
        SystemExit: It is, with status 2.
    """
    message = user_message(error)
    if message is not None:
        let_the_first_speak()
        print(f"error: {message}", file=sys.stderr)  # noqa: T201
        raise SystemExit(USER_ERROR_EXIT)


def user_message(error: BaseException) -> str | None:
    """Returns one line for the user where ``error`` is a mistake in settings or input, None where it is a bug.

    A ``ValueError`` or ``MemoryError`` is the user's if this package raised it; one from within a library is a bug of
    its caller. Files that cannot be read or written are the user's always.
    """
    if isinstance(error, InstantiationException) and error.__cause__ is not None:
        cause = error.__cause__
        # The arguments come from the configuration, so wrong names and values are the user's wherever they are found.
        own = isinstance(cause, (TypeError, ValueError, ImportError, *_misconfiguration()))
        section = str(error).rpartition("full_key: ")[2].strip()
        return _with_section(section, _one_line(cause)) if own else None
    if type(error).__module__.partition(".")[0] == "submitit":  # a job of SLURM's was killed: memory, time, a node
        return (
            f"{str(error).splitlines()[0]}: it died; when all others are over, the same command with sweep=last goes on"
        )
    outside = isinstance(error, (HydraException, OmegaConfBaseException, OSError, *_misconfiguration()))
    return _one_line(error) if outside or _is_own_refusal(error) else None


def _misconfiguration() -> tuple[type[BaseException], ...]:
    """Lightning's exception for a user's mistake; none where Lightning was not imported."""
    module = sys.modules.get("lightning.pytorch.utilities.exceptions")
    return () if module is None else (module.MisconfigurationException,)


def _is_own_refusal(error: BaseException) -> bool:
    if not isinstance(error, (ValueError, MemoryError)):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]


@contextmanager
def settings_of(section: str) -> Iterator[None]:
    """Inside, what a class says of its arguments is said of the settings of a section: `path` is `data.path`.

    Raises:
        ValueError: Whatever mistake of the user's is found inside.
    """
    try:
        yield
    except ValueError as error:
        if not _is_own_refusal(error):
            raise
        raise ValueError(_with_section(section, str(error))) from error


def _with_section(section: str, message: str) -> str:
    """Puts the section of the configuration before a message that does not name it."""
    if message.startswith(section):
        return message
    return f"{section}.{message}" if _SETTING.match(message) else f"{section}: {message}"


def _one_line(error: BaseException) -> str:
    text = str(error).partition("Config search path")[0]  # where Hydra looked helps nobody choose an option
    if isinstance(error, HydraException):
        text = explain(text, Path(config_dir()))
    return textwrap.shorten(text, _LONGEST_MESSAGE, placeholder=" ...")
