"""Rank of a process in its run, and exchange of plans and errors with the other ranks."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_memo.parallel.parallel_sizes import ParallelSizes
from lightning_memo.parallel.run_on_ranks import gather

T = TypeVar("T")
log = logging.getLogger(__name__)


class FailedElsewhere(ValueError):
    """Another rank has an error."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that a process shares its run, its step and its host with. The default is a single process.

    Attributes:
        parallel: Label of the parallel sizes that is stored in plans, like "dp2-cp2-tp1-zero3".
        on_this_node: Number of processes on this host, which share its memory.
        alike: Process group that follows one plan, the processes of a pipeline stage; `None` if all processes do.
        stages: Process group of this process's counterparts in the other stages of a pipeline, if all stages have to
            cut layers into the same slices; `None` if not. Sequence parallelism lays out tokens by slices.
        in_step: Process group that runs the same slices of layers at the same time, because its processes compute the
            same sequences or send each other tokens; `None` if only this process does.
        shares_experts: Whether processes of `in_step` compute other sequences, and send each other tokens.
        world: Whether the run has more than one process.
    """

    parallel: str = ParallelSizes().describe(zero_stage=0)
    on_this_node: int = 1
    alike: ProcessGroup | None = None
    stages: ProcessGroup | None = None
    in_step: ProcessGroup | None = None
    shares_experts: bool = False
    world: bool = False

    def gather(self, value: T, everyone: bool = True) -> list[T]:
        """Gathers a picklable value from every rank that follows the same plan.

        Args:
            value: Value of this rank.
            everyone: Gather from all of them; otherwise from the ranks of `in_step`.
        """
        group = self.alike if everyone else self.in_step
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


def _attempt(work: Callable[[], T], errors: tuple[type[Exception], ...]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except errors as error:
        return None, error


def processes_on_this_node() -> int:
    """Returns how many processes of the run have this host's name."""
    return gather(socket.gethostname()).count(socket.gethostname())


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
