"""The processes of a command: their preparation, results that rank zero computes for all, and their common end."""

from __future__ import annotations

import _thread
import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from lightning_memo.utils.process import is_rank_zero
from lightning_memo.utils.user_errors import one_line

_RESEND_SECONDS = 0.02


def prepare_process() -> None:
    """Make Ctrl-C end this process with one line, and hide torch's warnings about memory freed in measured steps.

    torch reads its log level when it is imported. Child processes inherit it. Garbage is not collected until
    `finish_imports`, because imports leave little garbage and many objects, which each collection would look at.
    """
    # In a measured step, torch warns about each freed buffer that was allocated earlier, which is harmless.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    _exit_on_interrupt()
    gc.disable()


def finish_imports() -> None:
    """Collect garbage again, but only among objects that are created from now on."""
    gc.freeze()
    gc.enable()


def _exit_on_interrupt() -> None:
    """Makes an interrupt end this process without a traceback, by the signal itself as shells expect.

    Python raises `KeyboardInterrupt` wherever the main thread is. Python ignores all exceptions in destructors and in
    callbacks of weak references; an interrupt that was ignored there is sent again.
    """
    sys.excepthook, sys.unraisablehook = _report_interrupt, _send_again


def _report_interrupt(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
    elif is_rank_zero():
        print("interrupted", file=sys.stderr)  # noqa: T201


def _send_again(ignored: Any) -> None:
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
    else:
        _thread.start_new_thread(_send, ())  # a `threading.Thread` needs locks that the main thread may hold


def _send() -> None:
    time.sleep(_RESEND_SECONDS)
    os.kill(os.getpid(), signal.SIGINT)


_DELAY_SECONDS = 15.0  # a busy machine takes some seconds to end a process
_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.2
_RESULT_KEY, _READERS_KEY = "lightning_memo/result", "lightning_memo/readers"


class SweepRefused(ValueError):
    """A launcher started several processes, each of which would run the sweep."""

    def __init__(self) -> None:
        super().__init__(
            "-m: start a sweep as one process, without torchrun or srun; each job of the sweep starts trainer.devices "
            "processes itself"
        )


def started_processes() -> int | None:
    """Returns how many processes a launcher has started for this command, or None without a launcher."""
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment  # not all commands need Lightning

    size = os.environ.get("WORLD_SIZE")
    if size is None and SLURMEnvironment.detect():
        size = os.environ.get("SLURM_STEP_NUM_TASKS")
    return None if size is None else int(size)


def arguments_of_process(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments of a Hydra command for this process. Only rank zero may create folders and files.

    The name of a run's folder contains the time, which differs between processes. Lightning broadcasts the folder of
    rank zero.

    Raises:
        SweepRefused: The command is a sweep, and a launcher started several processes.
    """
    if (started_processes() or 1) > 1 and {"-m", "--multirun", "hydra.mode=MULTIRUN"} & set(arguments):
        raise SweepRefused
    if is_rank_zero():
        return list(arguments)
    quiet = {"hydra.run.dir": ".", "hydra.output_subdir": "null", "hydra/job_logging": "stdout"}
    given = {argument.partition("=")[0] for argument in arguments}
    return [*arguments, *(f"{name}={value}" for name, value in quiet.items() if name not in given)]


def computed_on_rank_zero(compute: Callable[[], Any]) -> Any:
    """Returns the result of rank zero in every process that torchrun or srun has started.

    Nodes may see different states of a shared file system for a minute, and training hangs if only some processes
    resume. If Lightning starts the other processes, all of them run on one node and each computes the result itself.

    The result travels as JSON through the store of the rendezvous, to which every host of the network can write.

    Args:
        compute: Called in rank zero. Its result consists of the types of JSON, with lists instead of tuples.

    Raises:
        Exception: In rank zero, the exception that `compute` raised.
        ValueError: In the other processes, the message of this exception.
    """
    if (started_processes() or 1) == 1 or _environment() is None:
        return compute()
    store = _rendezvous_store()
    if not is_rank_zero():
        sent = json.loads(store.get(_RESULT_KEY))
        _count_reader(store)
        if "error" in sent:
            raise ValueError(sent["error"])
        return sent["result"]
    try:
        result = compute()
    except Exception as error:
        store.set(_RESULT_KEY, json.dumps({"error": one_line(str(error)) or type(error).__name__}))
        _count_reader(store)
        raise
    store.set(_RESULT_KEY, json.dumps({"result": result}))
    _count_reader(store)
    return result


def _count_reader(store: Any) -> None:
    """Deletes the result after the last process has it: torchrun may keep the store when it restarts the processes."""
    if store.add(_READERS_KEY, 1) == started_processes():
        store.delete_key(_RESULT_KEY)
        store.delete_key(_READERS_KEY)


def _environment() -> Any:
    """Lightning's cluster environment of the launcher that started all processes, or None without a launcher."""
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    found = next((each for each in (TorchElasticEnvironment, SLURMEnvironment) if each.detect()), None)
    return None if found is None else found()


@functools.cache
def _rendezvous_store() -> Any:
    """The store for the rendezvous of the launcher's processes; the process group uses the same store later."""
    from torch.distributed.rendezvous import rendezvous

    environment = _environment()
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
    store, _, _ = next(rendezvous("env://", environment.global_rank(), environment.world_size()))
    return store


def delay_unless_rank_zero() -> None:
    """Returns at once in rank zero, and after a delay in other processes.

    A mistake usually occurs in all processes alike. Rank zero reports the mistake and exits, and the launcher ends the
    other processes during their delay. A mistake of one process alone (its node lacks a file) is reported late.
    """
    if not is_rank_zero():
        time.sleep(_DELAY_SECONDS)


@contextlib.contextmanager
def ending_together(launcher: Any, with_parent: bool = False) -> Iterator[None]:
    """Inside the block, this process and those that Lightning's launcher starts end together if one of them fails.

    Args:
        launcher: Launcher of a strategy. One that starts no processes, or `None`, has no effect.
        with_parent: Whether all of them also end when the parent of this process ends.
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
        children.finished.set()


class _Children(threading.Thread):
    """Ends this process with a failed child's exit status, or when the parent has ended.

    Lightning's own observer kills this process with SIGKILL when a child fails, which loses the exit status and the
    messages that are being printed.
    """

    def __init__(self, launcher: Any, parent: int | None) -> None:
        super().__init__(name="children", daemon=True)
        self.finished = threading.Event()
        self._launcher, self._parent = launcher, parent
        self._children: list[subprocess.Popen[bytes]] = []

    def run(self) -> None:
        while not self.finished.wait(_POLL_SECONDS):
            if self._parent not in (None, os.getppid()):
                self.end()
                # Lightning's handler of SIGTERM broadcasts, and may wait forever for another process.
                os._exit(128 + signal.SIGTERM)
            status = next((child.returncode for child in self._launcher.procs if child.poll()), 0)
            if status:
                self._take_over()
                if not self.finished.wait(_GRACE_SECONDS):  # this process may fail by itself, with a better message
                    self.end()
                    os._exit(max(status, 1))  # exceptions cannot interrupt a collective in the main thread

    def end(self) -> None:
        """Ends the children, which may otherwise wait for this process for half an hour."""
        self._take_over()
        deadline = time.monotonic() + _GRACE_SECONDS
        for child in self._children:
            try:
                child.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                child.kill()  # a process that waits in a collective does not react to SIGTERM
                child.wait()

    def _take_over(self) -> None:
        """Removes the children from Lightning's list, so that its observer does not react to their end."""
        self._children += self._launcher.procs
        self._launcher.procs.clear()
