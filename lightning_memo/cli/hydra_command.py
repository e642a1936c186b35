"""Common parts of the Hydra commands: the configuration folder, and one-line messages for users' mistakes."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, InstantiationException
from omegaconf import DictConfig, OmegaConf

from lightning_memo.cli.launch import delay_unless_rank_zero
from lightning_memo.cli.restarts import register_run_folder
from lightning_memo.cli.setting_names import check_overrides, rewrite_hydra_message
from lightning_memo.utils.user_errors import is_own_refusal, misconfiguration_errors, one_line, user_message

USER_ERROR_EXIT = 2
_HYDRA_KEYS = ("_target_", "defaults")
_SETTING = re.compile(r"[a-z_]+[=:]")


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

    A process that lost another one has said so in one line, and ends with status 1. All other exceptions are bugs and
    keep their tracebacks.
    """
    # Otherwise Hydra prints several lines of its own for bugs and mistakes alike, and exits with status 1.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register_run_folder()
    try:
        check_overrides(sys.argv[1:], Path(config_dir()))
        command()
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
    text = str(error).partition("Config search path")[0]  # Hydra's search path does not help to choose an option
    if isinstance(error, HydraException):
        text = rewrite_hydra_message(text, Path(config_dir()))
    return one_line(text)
