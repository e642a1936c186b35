"""Distinguishes mistakes in settings and input, which a user can correct, from bugs."""

from __future__ import annotations

import sys
import textwrap
import traceback

from omegaconf.errors import OmegaConfBaseException

_MAX_MESSAGE_CHARACTERS = 600  # some libraries list every name that they know


class RefusedAtAnyLength(ValueError):
    """A model is refused whatever the number of tokens, so that a trial run on few tokens refuses it, too."""


def user_message(error: BaseException) -> str | None:
    """Returns one line for the user if `error` is a mistake in settings or input, or None if it is a bug.

    A `ValueError` or `MemoryError` counts as a user's mistake only if this package raised it: one from a library is a
    bug of the calling code. Files that cannot be read or written are always the user's concern.
    """
    if isinstance(error, (OmegaConfBaseException, OSError, *misconfiguration_errors())) or is_own_refusal(error):
        return one_line(str(error))
    return None


def is_own_refusal(error: BaseException) -> bool:
    """Whether code of this package raised the `ValueError` or `MemoryError`."""
    if not isinstance(error, (ValueError, MemoryError)):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    return bool(frames) and frames[-1][0].f_globals.get("__name__", "").partition(".")[0] == __name__.partition(".")[0]


def misconfiguration_errors() -> tuple[type[BaseException], ...]:
    """Lightning's exception class for a user's mistake, if Lightning has been imported."""
    module = sys.modules.get("lightning.pytorch.utilities.exceptions")
    return () if module is None else (module.MisconfigurationException,)


def one_line(text: str) -> str:
    """The text on one line, shortened if it is very long."""
    return textwrap.shorten(text, _MAX_MESSAGE_CHARACTERS, placeholder=" ...")
