"""Runs a function on several ranks so that it succeeds on all of them or raises on all of them.

No rank continues, or waits in a collective, after another rank has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

T = TypeVar("T")

_USER_ERRORS = (OSError, ValueError)


def is_first_rank() -> bool:
    """Whether this process is rank 0 or the only process."""
    return not dist.is_initialized() or dist.get_rank() == 0


def on_every_rank(work: Callable[[], T]) -> T:
    """Runs `work` on every rank and waits for all ranks.

    Args:
        work: Function to call.

    Returns:
        Result of `work` on this rank.

    Raises:
        Exception: `work` failed on this rank. If it failed on another rank only, an `OSError`, `ValueError` or
            `RuntimeError` names the first rank that failed, with its error message.
    """
    result, error = _attempt(work)
    _raise_together(error, gather(None if error is None else _describe(error)))
    assert error is None
    return result  # type: ignore[return-value]


def on_first_rank(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and sends the result to all ranks.

    Args:
        work: Function to call. Its result must be picklable.

    Returns:
        Result of `work` on rank 0.

    Raises:
        Exception: `work` failed; see :func:`on_every_rank`.
    """
    result, error = _attempt(work) if is_first_rank() else (None, None)
    answers = gather((result, None if error is None else _describe(error)))
    _raise_together(error, [description for _, description in answers])
    return answers[0][0]  # type: ignore[no-any-return]


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except CheckpointException as error:  # a BaseException whose message holds the tracebacks of all ranks
        rank, (cause, _) = next(iter(error.failures.items()))
        kind, message = _describe(cause)
        return None, kind(f"rank {rank}: {message}")
    except Exception as error:
        return None, error


def _describe(error: BaseException) -> tuple[type[Exception], str]:
    """Returns the closest exception class that can be sent to other processes, and a one-line message."""
    for kind in _USER_ERRORS:
        if isinstance(error, kind):
            text = f"{error.filename}: {error.strerror}" if getattr(error, "filename", None) else str(error)
            return kind, text
    return RuntimeError, f"{type(error).__name__}: {error}"


def _raise_together(error: Exception | None, descriptions: list[tuple[type[Exception], str] | None]) -> None:
    if error is not None:
        raise error
    for rank, description in enumerate(descriptions):
        if description is not None:
            kind, message = description
            raise kind(f"rank {rank}: {message}")


def gather(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gathers a picklable value from every rank of a group.

    Args:
        value: Value of this rank.
        group: Process group; `None` gathers from all ranks.

    Returns:
        Values in the order of the ranks.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
