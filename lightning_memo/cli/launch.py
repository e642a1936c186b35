"""One command in several processes: which of them speaks and writes, and how all of them end together."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

T = TypeVar("T")

# Set by torchrun, Lightning's launcher (of a node, and of the nodes), SLURM and LSF, each for the processes it starts.
_RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
_SILENCE_SECONDS = 15.0  # a busy machine takes some seconds to end a process
_LAST_WORDS_SECONDS = 2.0
_POLL_SECONDS = 0.2
_TOLD, _HEARD = "lightning_memo/told", "lightning_memo/heard"


class SweepRefused(ValueError):
    """A launcher has started several processes, and each of them would run the sweep."""

    def __init__(self) -> None:
        super().__init__(
            "-m: start a sweep as one process, without torchrun or srun; each of its jobs starts trainer.devices "
            "processes by itself"
        )


def is_first_process() -> bool:
    """Whether this process is the one that prints and writes for all; needs no process group."""
    return all(os.environ.get(name, "0") == "0" for name in _RANKS)


def started_processes() -> int | None:
    """How many processes a launcher has started for this command; None if there is none, yet."""
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment  # not all commands need Lightning

    size = os.environ.get("WORLD_SIZE")
    if size is None and SLURMEnvironment.detect():
        size = os.environ.get("SLURM_STEP_NUM_TASKS")
    return None if size is None else int(size)


def arguments_of_process(arguments: Sequence[str]) -> list[str]:
    """The arguments of a Hydra command for this process: all but the first make no folder and no file.

    Folders are named by the time, which is another one in each process; Lightning tells all of them the first one's.

    Raises:
        SweepRefused: It is a sweep, and there are several processes.
    """
    if (started_processes() or 1) > 1 and {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments):
        raise SweepRefused
    if is_first_process():
        return list(arguments)
    quiet = {"hydra.run.dir": ".", "hydra.output_subdir": "null", "hydra/job_logging": "stdout"}
    given = {argument.partition("=")[0] for argument in arguments}
    return [*arguments, *(f"{name}={value}" for name, value in quiet.items() if name not in given)]


def told_by_the_first(find: Callable[[], T]) -> T:
    """Returns what the first process finds, in every process that torchrun or srun has started.

    Hosts that share a file system may see it differently for a minute, and processes of which one resumes and another
    does not would wait for each other. Where Lightning starts the others, each finds it by itself, on one host.

    Args:
        find: Called in the first process; what it returns or raises has to be picklable.

    Raises:
        Exception: What the first process's `find` raised.
    """
    if (started_processes() or 1) == 1 or _environment() is None:
        return find()
    store = _meeting_point()
    if is_first_process():
        outcome = _attempt(find)
        store.set(_TOLD, pickle.dumps(outcome))
    else:
        outcome = pickle.loads(store.get(_TOLD))
    if store.add(_HEARD, 1) == started_processes():  # torchrun may keep the store for the next start
        store.delete_key(_TOLD)
        store.delete_key(_HEARD)
    found, error = outcome
    if error is not None:
        raise error
    return cast(T, found)


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _environment() -> Any:
    """Lightning's knowledge of the launcher that has started all processes, None where there is none."""
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    found = next((each for each in (TorchElasticEnvironment, SLURMEnvironment) if each.detect()), None)
    return None if found is None else found()


@functools.cache
def _meeting_point() -> Any:
    """The store at which the processes of a launcher find each other; the process group then takes the same one."""
    from torch.distributed.rendezvous import rendezvous

    environment = _environment()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    store, _, _ = next(rendezvous("env://", environment.global_rank(), environment.world_size()))
    return store


def let_the_first_speak() -> None:
    """Returns at once in the first process, and after a while in others.

    A mistake is the same one everywhere, as a rule. The first process tells it and ends, and the launcher ends the
    others while they are in here; a mistake that one process alone meets (a file that its node lacks) is told late.
    """
    if not is_first_process():
        time.sleep(_SILENCE_SECONDS)


@contextlib.contextmanager
def ending_together(launcher: Any, with_parent: bool = False) -> Iterator[None]:
    """Inside, this process and those that Lightning's launcher starts end together if one of them fails.

    Args:
        launcher: Of a strategy; one that starts no processes, or `None`, is left alone.
        with_parent: Whether they end with the process that started this one, too.
    """
    if not hasattr(launcher, "procs"):
        yield
        return
    children = _Children(launcher, os.getppid() if with_parent else None)
    children.start()
    try:
        yield
    except BaseException:
        children.end()
        raise
    finally:
        children.over.set()


class _Children(threading.Thread):
    """Waits for a child to fail, and then ends this process with the child's exit status; or for the parent to end.

    Lightning's observer would do the former by SIGKILL: no exit status, and nothing of what was being said.
    """

    def __init__(self, launcher: Any, parent: int | None) -> None:
        super().__init__(name="children", daemon=True)
        self.over = threading.Event()
        self._launcher, self._parent = launcher, parent
        self._children: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        while not self.over.wait(_POLL_SECONDS):
            if self._parent not in (None, os.getppid()):
                self.end()
                # Lightning's handler of SIGTERM may wait for another process for ever: it broadcasts in it.
                os._exit(128 + signal.SIGTERM)
            status = next((child.returncode for child in self._launcher.procs if child.poll()), 0)
            if status:
                self._take()
                if not self.over.wait(_LAST_WORDS_SECONDS):  # this process may notice by itself, and say more
                    self.end()
                    os._exit(max(status, 1))  # the main thread may wait in a collective, which no exception reaches

    def end(self) -> None:
        """Ends the children, which may wait for this process for half an hour."""
        self._take()
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        for child in self._children:
            try:
                child.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                child.kill()  # SIGTERM does not reach a process that waits in a collective
                child.wait()

    def _take(self) -> None:
        """Takes the children away from Lightning's observer, which reads this very list."""
        self._children += self._launcher.procs
        self._launcher.procs.clear()
