"""Messages to the user, by the logger "lightning_memo".

At INFO, the default, a run says what it does in a few lines; at DEBUG it explains its plans; at WARNING it is quiet.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

from lightning_utilities.core.rank_zero import rank_zero_only
from rich.console import Console
from rich.table import Table
from typing_extensions import override

_LOGGER: Final = logging.getLogger("lightning_memo")


class _Shown(logging.StreamHandler[Any]):
    """Shows messages on stderr where the program has set up no logging."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


if _LOGGER.level == logging.NOTSET:
    _LOGGER.setLevel(logging.INFO)
_LOGGER.addHandler(_Shown())


@rank_zero_only
def tell(text: str, level: int = logging.INFO) -> None:
    """Log a message on the first process."""
    _LOGGER.log(level, "lightning_memo: %s", text)


@rank_zero_only
def show(tables: Callable[[], Iterable[Table]], level: int = logging.INFO) -> None:
    """Make tables and print them on the first process, if messages of this level are logged."""
    if _LOGGER.isEnabledFor(level):
        Console().print(*tables(), sep="\n")
