"""Rank of a process in its run, and agreement with the other ranks on values, plans and errors.

No rank continues, or waits in a collective, after another rank has failed.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import CheckpointException

from lightning_memo.artifacts.plan import Plan
from lightning_memo.parallel.parallel_sizes import ParallelSizes

T = TypeVar("T")
log = logging.getLogger(__name__)
_USER_ERRORS = (FileNotFoundError, OSError, ValueError)


class FailedElsewhere(ValueError):
    """Another rank has an error."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that a process shares its run, its step and its host with. The default is a single process.

    Attributes:
        parallel: Label of the parallel sizes that is stored in plans, like "dp2-cp2-tp1-zero3".
        on_this_node: Number of processes on this host, which share its memory.
        plan_group: Process group that follows one plan, the processes of a pipeline stage; `None` if all processes do.
        stages: Process group of this process's counterparts in the other stages of a pipeline, if all stages have to
            cut layers into the same slices; `None` if not. Sequence parallelism lays out tokens by slices.
        slice_group: Process group that runs the same slices of layers at the same time, because its processes compute
            the same sequences or send each other tokens; `None` if only this process does.
        shares_experts: Whether processes of `slice_group` compute other sequences, and send each other tokens.
        world: Whether the run has more than one process.
    """

    parallel: str = ParallelSizes().describe(zero_stage=0)
    on_this_node: int = 1
    plan_group: ProcessGroup | None = None
    stages: ProcessGroup | None = None
    slice_group: ProcessGroup | None = None
    shares_experts: bool = False
    world: bool = False

    @property
    def all_together(self) -> bool:
        """Whether all processes run the same slices, and so profile and plan later batches together as well."""
        if not self.world:
            return True
        return self.slice_group is not None and dist.get_world_size(self.slice_group) == dist.get_world_size()

    def gather(self, value: T, everyone: bool = True) -> list[T]:
        """Gathers a picklable value from every rank that follows the same plan.

        Args:
            value: Value of this rank.
            everyone: Gather from all of them; otherwise from the ranks of `slice_group`.
        """
        group = self.plan_group if everyone else self.slice_group
        if not self.world or (group is None and not everyone):
            return [value]
        return gather(value, group)

    def gather_slicing(self, value: T, everyone: bool = True) -> list[T]:
        """Gathers a picklable value from every rank that cuts layers into the same slices, on all stages.

        Args:
            value: Value of this rank.
            everyone: As for :meth:`gather`.
        """
        values = self.gather(value, everyone)
        if self.stages is None:
            return values
        return [v for of_stage in gather(values, self.stages) for v in of_stage]

    def run_alike(self, work: Callable[[], T], everyone: bool = True) -> T:
        """Do work that may fail on one rank: then it fails on all that cut layers into the same slices.

        Ranks on which it did not fail raise a :class:`FailedElsewhere`. Other stages of a pipeline are not told.

        Args:
            work: The work.
            everyone: As for :meth:`gather`.

        Raises:
            ValueError: The work failed on a rank.
        """
        result, error = _attempt(work, (ValueError,))
        messages = self.gather_slicing(None if error is None else str(error), everyone)
        if error is not None:
            raise error
        if failed := [message for message in messages if message is not None]:
            raise FailedElsewhere(failed[0])
        return cast(T, result)

    def run_together(
        self, work: Callable[[], T], everyone: bool = True, errors: tuple[type[Exception], ...] = (ValueError,)
    ) -> T:
        """Do work that may fail on one rank, and raise as :meth:`raise_together` does.

        Args:
            work: The work.
            everyone: As for :meth:`gather`.
            errors: The errors that others are told of.

        Raises:
            ValueError: The work failed on a rank. A single process raises its own error.
        """
        result, error = _attempt(work, errors)
        self.raise_together(error, everyone)
        return cast(T, result)

    def raise_together(self, error: Exception | None, everyone: bool = True) -> None:
        """Raise on every rank if any rank has an error. A single process raises its own error.

        Args:
            error: Error of this rank, or `None`.
            everyone: As for :meth:`gather`.

        Raises:
            ValueError: A rank has an error. The message is one line that names the first such rank.
        """
        message = None if error is None or isinstance(error, FailedElsewhere) else str(error)
        messages = gather(message) if everyone and self.world else self.gather_slicing(message, everyone)
        failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
        if not failed:
            return
        if error is not None and len(messages) == 1:
            raise error
        rank, message = failed[0]
        of_group = "" if everyone else " of the processes that share its sequences or experts"
        raise ValueError(f"rank {rank}{of_group}: {message}") from error


def agree_on_plan(solve: Callable[[float | None, bool, int | None], Plan], ranks: Ranks, everyone: bool) -> Plan:
    """Returns this rank's plan with the alpha that all ranks use: the smallest alpha that any of them can run.

    All run layers again in segments of the same size, too.

    Args:
        solve: Computes this rank's plan from an alpha (`None` for the user's setting), from whether the plan may be
            plain training, and from the size of segments (`None` for the longest ones that fit).
        ranks: Ranks of the run.
        everyone: Agree among all ranks; otherwise among the ranks that compute the same sequences.

    Raises:
        ValueError: A rank has no feasible plan.
    """
    plan = ranks.run_alike(lambda: solve(None, True, None), everyone)
    if len(set(ranks.gather_slicing(plan.swap.plain, everyone))) > 1:
        plan = ranks.run_alike(lambda: solve(None, False, None), everyone)
    segment = smallest_segments(plan.swap.storage.segment_calls, lambda own: ranks.gather_slicing(own, everyone))
    smallest = min(ranks.gather_slicing(plan.swap.alpha, everyone))
    if segment != plan.swap.storage.segment_calls:
        return solve(0.0, False, segment)
    if plan.swap.alpha == smallest:
        return plan
    least = f"another process runs no more than alpha={smallest:.4g}, and all take the smallest"
    return replace(solve(smallest, False, None), reason=f"By itself alpha={plan.swap.alpha:.4g}, but {least}.")


def smallest_segments(own: int | None, gathered: Callable[[int | None], list[int | None]]) -> int | None:
    """Returns the size of the segments in which all ranks run layers again; `None` if none has to.

    Args:
        own: Size on this rank.
        gathered: Gathers the sizes of all ranks.
    """
    return min((size for size in gathered(own) if size is not None), default=None)


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


def rank_and_size() -> tuple[int, int]:
    """Returns the rank of this process and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def is_first_rank() -> bool:
    """Whether this process is rank 0 or the only process."""
    return rank_and_size()[0] == 0


def processes_on_this_node() -> int:
    """Returns how many processes of the run have this host's name."""
    return gather(socket.gethostname()).count(socket.gethostname())


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
    result, error = _attempt_anything(work)
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
    result, error = _attempt_anything(work) if is_first_rank() else (None, None)
    answers = gather((result, None if error is None else _describe(error)))
    _raise_together(error, [description for _, description in answers])
    return answers[0][0]  # type: ignore[no-any-return]


def _attempt(work: Callable[[], T], errors: tuple[type[Exception], ...]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except errors as error:
        return None, error


def _attempt_anything(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return _attempt(work, (Exception,))
    except CheckpointException as error:  # a BaseException whose message holds the tracebacks of all ranks
        rank, (cause, _) = next(iter(error.failures.items()))
        kind, message = _describe(cause)
        return None, kind(f"rank {rank}: {message}")


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


def comes_from_lost_process(error: BaseException) -> bool:
    """Return whether a collective failed because another process ended or did not answer in time."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def explain_lost_process(error: BaseException, rank: int) -> None:
    """Log one line that explains a failed collective, if `error` comes from one."""
    if comes_from_lost_process(error):
        log.error(
            "rank %d lost another process of the run, which ended or did not answer in time: look for the first error "
            "in the output of the other ranks; raise MemoStrategy(timeout=...) if one is only slow",
            rank,
        )
