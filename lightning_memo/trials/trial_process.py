"""A separate process for trials: whatever a failed attempt leaves behind disappears with the process."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any

from lightning_memo.trials.length_search import Attempt
from lightning_memo.trials.training_trial import Trial
from lightning_memo.utils.process import exit_with_parent
from lightning_memo.utils.user_errors import user_message

_MAX_OUTPUT_CHARACTERS = 4000
_KILLED = "the kernel killed the process (SIGKILL), which usually means that host memory ran out"


class TrialProcess:
    """Runs trials in a separate process, which is started when needed and restarted after an attempt that failed.

    The process trains a copy of the module. The caller's module, its optimizers and the random state do not change.

    Args:
        trial: Called with a number of tokens. It and the returned attempt must be picklable.
        memory_bytes: Host memory that the process may allocate, or None for no limit. The operating system refuses
            further memory to this process, so that a trial cannot exhaust the machine.
        preload: Names of modules that the fork server imports once, to make restarts fast.

    Raises:
        ValueError: `trial` cannot be pickled.
    """

    def __init__(self, trial: Callable[[int], Attempt], memory_bytes: int | None, preload: Sequence[str] = ()) -> None:
        self._memory_bytes = memory_bytes
        self._preload = [Trial.__module__, *preload]
        self._process: Any = None
        self._pipe: Connection | None = None
        self._output = Path()
        self._folder = tempfile.TemporaryDirectory(prefix="lengths-")
        try:
            # Plain pickle copies tensors; multiprocessing would share them with the process, which trains them.
            self._trial = pickle.dumps(trial)
        except Exception as error:
            raise ValueError(
                "lengths are tried in another process, and the module or batch_of cannot be pickled to send it there: "
                f"define the module's class and batch_of at the top level of an importable file ({error})"
            ) from error

    def __enter__(self) -> TrialProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()
        self._folder.cleanup()

    def __call__(self, tokens: int) -> Attempt:
        """Runs a trial of `tokens` tokens.

        Raises:
            ValueError: A setting is wrong.
            RuntimeError: The attempt failed for another reason than a lack of memory. The message holds its traceback.
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
            raise RuntimeError(f"the trial of {tokens} tokens failed:\n{result}")
        attempt: Attempt = result
        if not attempt.fits:
            self._stop()  # a new process is free of what the failed attempt left allocated
        return attempt

    def _ended(self, tokens: int) -> Attempt:
        """Returns the attempt whose process ended.

        Raises:
            RuntimeError: The process ended for another reason than a lack of memory.
        """
        self._process.join()
        status, output = self._process.exitcode, self._output.read_text(errors="replace")[-_MAX_OUTPUT_CHARACTERS:]
        self._stop()
        if status == -signal.SIGKILL:
            return Attempt(tokens=tokens, fits=False, reason=_KILLED)
        raise RuntimeError(f"the trial of {tokens} tokens failed: its process ended with status {status}:\n{output}")

    def _start(self) -> None:
        # A fork server has none of this process's threads and CUDA state, and later processes start fast.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(self._preload)
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
                "the process that tries lengths ended during its start: put the code of the script under "
                '`if __name__ == "__main__":`'
            ) from error
        there.close()

    def _stop(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
            self._process.kill()
            self._process.join()
        self._pipe = None


def _serve(pipe: Connection, pickled: bytes, memory_bytes: int | None, folder: str, output: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.chdir(folder)
    tempfile.tempdir = str(output.parent)  # the parent removes it, even if this process is killed
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    watch = exit_with_parent(output.parent)  # from now on, the folder may vanish
    trial = pickle.loads(pickled)
    if memory_bytes is not None:
        _limit_memory(memory_bytes)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(_try(trial, pipe.recv()))
    watch.join()  # the parent closed the pipe: it kills this process, or has ended itself


def _try(trial: Callable[[int], Attempt], tokens: int) -> tuple[str, Any]:
    try:
        return "done", trial(tokens)
    except Exception as error:
        message = user_message(error)
        return ("failed", traceback.format_exc()) if message is None else ("refused", message)


def _limit_memory(memory_bytes: int) -> None:
    """Limits this process to its present memory plus `memory_bytes`, and makes it the kernel's first choice to kill."""
    import resource  # does not exist on Windows

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    held = int(status["VmData"].split()[0]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = held + memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
