"""`python` and `torchrun` as forks of a process that has already imported the libraries, which takes 5 CPU seconds.

Lightning and this package are not imported beforehand, because they read the environment when they are imported.
Arguments, environment, working directory, streams, signals and exit status are those of a separate interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.launcher.api",
    "torch.distributed.tensor.parallel", "torch.utils.tensorboard", "torchmetrics", "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama", "transformers.optimization", "peft", "matplotlib.pyplot", "hydra",
    "hydra.core.override_parser.overrides_visitor", "rich.table", "highspy", "huggingface_hub.hf_file_system",
    "fsspec.implementations.local", "PIL.Image", "torch.distributed.checkpoint",
)  # fmt: skip
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@functools.cache
def tools() -> Path:
    """Return a folder with `python` and `torchrun` to put first in PATH. Their server ends with this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(_remove, folder)
    address = folder / "socket"
    for name in ("python", "torchrun"):
        command = shlex.join([sys.executable, "-IS", __file__, str(address), sys.executable, name])
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    return folder


def _remove(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def _client(address: str, python: str, name: str, arguments: list[str]) -> None:
    """Let the server run a command with this process's streams, and exit with the status of that command."""
    module = ["-m", "torch.distributed.run"] if name == "torchrun" else []
    words = [*module, *(arguments if module or arguments[:1] != ["-u"] else arguments[1:])]
    if not words or words[0] == "-":  # the code comes from stdin
        os.execv(python, [python, *arguments])
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = {"words": words, "folder": str(Path.cwd()), "environment": dict(os.environ)}
        socket.send_fds(server, [b"."], [0, 1, 2])
        answers = server.makefile("rw")
        print(json.dumps(request), file=answers, flush=True)
        process = int(answers.readline())
        for number in _SIGNALS:
            signal.signal(number, lambda given, _: _kill(process, given))
        status = int(answers.readline())
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _kill(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


class _Server:
    """Forks a process for each client, and kills it if the client ends first."""

    def __init__(self, address: str) -> None:
        self._processes: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)

    def serve(self) -> dict[str, Any] | None:
        """Serve clients. Returns the request in each fork, and None in the server once its parent has ended."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._listener:
                    if (request := self._accept()) is not None:
                        return request
                elif key.fileobj == 0:
                    for process in self._processes.values():
                        os.killpg(process, signal.SIGKILL)
                    return None
                elif key.data is not None:
                    self._reap(key.fd, key.data)
                elif key.fileobj in self._processes:
                    os.killpg(self._processes[key.fileobj], signal.SIGKILL)
                    self._selector.unregister(key.fileobj)

    def _accept(self) -> dict[str, Any] | None:
        client, _ = self._listener.accept()
        _, streams, _, _ = socket.recv_fds(client, 1, 3)
        with client.makefile() as lines:
            line = lines.readline()
        if not line:  # the client was killed in the meantime
            client.close()
            return None
        request: dict[str, Any] = json.loads(line)
        process = os.fork()
        if process:
            for stream in streams:
                os.close(stream)
            _tell(client, process)
            self._processes[client] = process
            self._selector.register(client, selectors.EVENT_READ)
            self._selector.register(os.pidfd_open(process), selectors.EVENT_READ, client)
            return None
        self._leave(client)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return request

    def _reap(self, pidfd: int, client: socket.socket) -> None:
        _, status = os.waitpid(self._processes.pop(client), 0)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if client in self._selector.get_map():
            self._selector.unregister(client)
            _tell(client, os.waitstatus_to_exitcode(status))
        client.close()

    def _leave(self, client: socket.socket) -> None:
        os.setsid()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
            elif key.fd:
                os.close(key.fd)
        self._selector.close()
        client.close()
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _tell(client: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the client was killed, which the selector reports next
        client.sendall(f"{number}\n".encode())


def _become(words: list[str], folder: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.executable = str(Path(sys.argv[1]).with_name("python"))
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if words[0] == "-m":
        sys.path[:1], sys.argv = [folder, *given], words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path[:1], sys.argv = ["", *given], ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.path[:1], sys.argv = [str(Path(words[0]).resolve().parent), *given], words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _client(*sys.argv[1:4], sys.argv[4:])
    for name in _PRELOADED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends when its parent does
    server = _Server(sys.argv[1])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if (request := server.serve()) is not None:
        _become(**request)
