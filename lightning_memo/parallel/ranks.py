"""What the processes of a run tell each other, so that all do the same."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_memo.artifacts.plan import Plan
from lightning_memo.parallel.agree import gather
from lightning_memo.parallel.sizes import ParallelSizes

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ranks:
    """A process among those of its run. The default is a run of one process.

    Attributes:
        parallel: Sizes of the run's parallelism, as plans are labelled with them.
        on_this_node: Processes that share this one's host memory.
        sequence: The group that works on the same sequences; `None` if it is this process alone.
        world: Whether there are others at all.
    """

    parallel: str = ParallelSizes().describe(zero_stage=0)
    on_this_node: int = 1
    sequence: ProcessGroup | None = None
    world: bool = False

    def gather(self, value: T, everyone: bool = True) -> list[T]:
        """The value of every process, by rank; or only of those that work on the same sequences."""
        group = None if everyone else self.sequence
        if not self.world or (group is None and not everyone):
            return [value]
        return gather(value, group)

    def raise_together(self, error: Exception | None, everyone: bool = True) -> None:
        """End all processes with one line if any of them has an error; a process alone raises its own.

        Raises:
            ValueError: Some process has an error.
        """
        messages = self.gather(None if error is None else str(error), everyone)
        failed = [(rank, message) for rank, message in enumerate(messages) if message is not None]
        if not failed:
            return
        if error is not None and len(messages) == 1:
            raise error
        rank, message = failed[0]
        of_group = "" if everyone else " of the processes that share its sequences"
        raise ValueError(f"rank {rank}{of_group}: {message}") from error


def processes_on_this_node() -> int:
    """How many processes of the run have this host's name."""
    return gather(socket.gethostname()).count(socket.gethostname())


def explain_lost_process(error: BaseException, rank: int) -> None:
    """Say in one line what a failed collective means, if `error` is one."""
    if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
        log.error(
            "rank %d lost another process of the run, which ended or did not answer in time: look for the first error "
            "in the output of the other ranks; raise MemoStrategy(timeout=...) if one is only slow",
            rank,
        )


def agree_on_plan(solve: Callable[[float | None, bool], Plan], ranks: Ranks, everyone: bool) -> Plan:
    """A plan for each process with the same alpha: the smallest that any of them can run.

    Args:
        solve: Makes this process's plan from an alpha (`None`: the user's), and whether it may be plain training.
        ranks: Who has to agree.
        everyone: All processes, or those that work on the same sequences.

    Raises:
        ValueError: Some process finds no plan.
    """
    plan = _solve_together(solve, True, ranks, everyone)
    if len(set(ranks.gather(plan.swap.mode, everyone))) > 1:
        plan = _solve_together(solve, False, ranks, everyone)
    smallest = min(ranks.gather(plan.swap.alpha, everyone))
    if plan.swap.alpha == smallest:
        return plan
    least = f"another process runs no more than alpha={smallest:.4g}, and all take the smallest"
    return replace(solve(smallest, False), reason=f"By itself alpha={plan.swap.alpha:.4g}, but {least}.")


def _solve_together(
    solve: Callable[[float | None, bool], Plan], may_be_plain: bool, ranks: Ranks, everyone: bool
) -> Plan:
    plan, error = None, None
    try:
        plan = solve(None, may_be_plain)
    except ValueError as refused:
        error = refused
    ranks.raise_together(error, everyone)
    assert plan is not None
    return plan
