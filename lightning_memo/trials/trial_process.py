"""A process in which lengths are tried, so that whatever a failed attempt leaves behind goes with it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_memo.cli.hydra_command import user_message
from lightning_memo.trials.length_search import Attempt
from lightning_memo.trials.trial import Trial

_LONGEST_OUTPUT = 4000
_KERNEL = "the kernel ended the process (SIGKILL), as it does where memory runs out"


class TrialProcess:
    """Tries lengths in a process of its own, which is started when it is needed, and anew after an attempt that failed.

    The module that is trained there is a copy: the one at home, its optimizers and the random state stay as they are.

    Args:
        trial: Tries a length; it, its result and what it refers to can be pickled.
        memory_bytes: Host memory that an attempt may take; more is refused by the system, and does not end anything
            else on the machine. `None`: no limit.

    Raises:
        ValueError: `trial` can't be pickled.
    """

    def __init__(self, trial: Callable[[int], Attempt], memory_bytes: int | None) -> None:
        self._memory_bytes = memory_bytes
        self._process: Any = None
        self._pipe: Connection | None = None
        self._output = Path()
        self._folder = tempfile.TemporaryDirectory(prefix="lengths-")
        try:
            # By plain pickle: multiprocessing would share tensors with the process, which trains them.
            self._trial = pickle.dumps(trial)
        except Exception as error:
            raise ValueError(
                "lengths are tried in another process, and what it needs can't be sent there: define the class of the "
                f"module and batch_of at the top of a file that can be imported ({error})"
            ) from error

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._folder.cleanup()

    def __call__(self, tokens: int) -> Attempt:
        """Tries a length.

        Raises:
            ValueError: A setting is wrong.
            RuntimeError: The attempt failed for another reason than memory; the message holds its traceback.
        """
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(tokens)
            kind, result = self._pipe.recv()
        except (EOFError, OSError):
            return self._ended(tokens)
        if kind == "refused":
            raise ValueError(result)
        if kind == "failed":
            raise RuntimeError(f"{tokens} tokens can't be tried:\n{result}")
        if not result.fits:
            self._stop()  # what a lack of memory left half done is gone for certain
        return result

    def _ended(self, tokens: int) -> Attempt:
        """The process is gone.

        Raises:
            RuntimeError: Not for lack of memory.
        """
        self._process.join()
        status, said = self._process.exitcode, self._output.read_text(errors="replace")[-_LONGEST_OUTPUT:]
        self._stop()
        if status == -signal.SIGKILL:
            return Attempt(tokens=tokens, fits=False, reason=_KERNEL)
        raise RuntimeError(f"{tokens} tokens can't be tried: the process ended with status {status}:\n{said}")

    def _start(self) -> None:
        # Clean of what PyTorch does here, and quick after the first.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([Trial.__module__])
        self._output = Path(self._folder.name) / "output.txt"
        self._pipe, there = context.Pipe()
        arguments = (there, self._trial, self._memory_bytes, str(Path.cwd()), self._output)
        self._process = context.Process(target=_serve, args=arguments, name="lengths", daemon=True)
        try:
            self._process.start()
        except (EOFError, ConnectionError) as error:
            self._pipe.close()
            self._pipe = None
            raise ValueError(
                "the process in which lengths are tried ended while it started: a script that searches lengths needs "
                '`if __name__ == "__main__":` before what it runs'
            ) from error
        there.close()

    def _stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
        self._pipe = None


def _serve(pipe: Connection, pickled: bytes, memory_bytes: int | None, folder: str, output: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever waits for an attempt ends this process
    watch = threading.Thread(target=end_with_parent, args=(output.parent,), daemon=True)
    watch.start()
    os.chdir(folder)
    tempfile.tempdir = str(output.parent)  # removed with it, even if this process is killed
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    trial = pickle.loads(pickled)
    if memory_bytes is not None:
        _limit_memory(memory_bytes)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_try(trial, pipe.recv()))
    watch.join()  # whoever closed the pipe ends this process, or has ended


def end_with_parent(folder: Path) -> None:
    """Waits for the end of the parent: nothing goes on that nobody waits for any more, and its folder does not stay."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)


def _try(trial: Callable[[int], Attempt], tokens: int) -> tuple[str, Any]:
    try:
        return "done", trial(tokens)
    except Exception as error:
        message = user_message(error)
        return ("failed", traceback.format_exc()) if message is None else ("refused", message)


def _limit_memory(memory_bytes: int) -> None:
    """Refuses this process more memory than it has and `memory_bytes`, and offers it to the kernel first."""
    import resource  # not on Windows

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(status["VmData"].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
