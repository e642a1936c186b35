"""`python` and `torchrun` as forks of a process that has already imported the libraries, which takes 5 CPU seconds.

Arguments, environment, working directory, streams, signals and exit status are those of a separate interpreter. When
Lightning is imported, it reads the rank from the environment, which each fork repeats. Bare forks have imported neither
Lightning nor this package: for tests of these imports, and of another copy of this package.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
import importlib
import itertools
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

_PRELOADED = (
    "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.launcher.api",
    "torch.distributed.tensor.parallel", "torch.utils.tensorboard", "torchmetrics", "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama", "transformers.optimization", "peft", "matplotlib.pyplot", "hydra",
    "hydra.core.override_parser.overrides_visitor", "rich.table", "highspy", "huggingface_hub.hf_file_system",
    "fsspec.implementations.local", "PIL.Image", "torch.distributed.checkpoint", "tensorboard.plugins.hparams.api_pb2",
)  # fmt: skip
_PRELOADED_UNLESS_BARE = (
    "lightning.pytorch", "lightning_memo.cli.step_stats", "lightning_memo.cli.build_run",
    "lightning_memo.cli.training_job",
    "lightning_memo.cli.sweep",
)  # fmt: skip
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGABRT)


def tools(bare: bool = False) -> Path:
    """Return a folder with `python` and `torchrun` to put first in PATH. Their server ends with this process."""
    return _tools() / ("bare" if bare else "full")


@functools.cache
def _tools() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    atexit.register(shutil.rmtree, folder)
    for kind, name in itertools.product(("bare", "full"), ("python", "torchrun")):
        path = folder / kind / name
        path.parent.mkdir(exist_ok=True)
        command = shlex.join([sys.executable, "-IS", __file__, str(path.with_name("socket")), sys.executable, name])
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)
    server = subprocess.Popen(
        [sys.executable, __file__, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert server.stdout is not None
    assert [server.stdout.readline() for _ in range(2)] == [b"ready\n"] * 2
    return folder


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
        with contextlib.suppress(OSError):  # SIGKILL has no other handler
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


def _become(python: Path, words: list[str], folder: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    if "lightning" in sys.modules:
        _repeat_import_of_lightning()
    os.chdir(folder)
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.executable = str(python)
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


def _repeat_import_of_lightning() -> None:
    """Do all that Lightning does with the environment when it is imported."""
    from lightning.fabric.utilities import rank_zero

    rank_zero.rank_zero_only.rank = rank_zero._get_rank() or 0
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def use_libyaml() -> None:
    """Let OmegaConf, and so Hydra, parse files with libyaml: the same objects in half the time."""
    import yaml
    from omegaconf import _utils

    rules: Any = _utils.get_yaml_loader()
    loader = type("Loader", (yaml.CSafeLoader, rules), {})
    _utils.get_yaml_loader = lambda: loader


def look_up_once() -> None:
    """Let each Trainer find the callbacks of other packages by the metadata that the first one has read.

    Seeds for devices that this machine has not got are no longer noted with the stack of whoever has set them.
    """
    import torch
    from lightning.fabric.utilities import registry

    registry.entry_points = functools.cache(registry.entry_points)
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.traceback = types.SimpleNamespace(format_stack=list)  # type: ignore[attr-defined]


def exempt_from_collection() -> None:
    """Let garbage collections leave out what lives now. Those of all that the libraries note take a second each."""
    gc.collect()
    gc.freeze()


def _use_hydra(folder: Path) -> None:
    """Compose a configuration: Hydra finds its plugins, and its parser caches what it learns of the grammar."""
    import hydra

    with hydra.initialize_config_dir(str(folder), version_base="1.3"):
        hydra.compose("train", ["data.path=/a/b_1.c", "seed=2", "callbacks.report=null", "+trainer.profiler=false"])


def _main(folder: Path) -> None:
    tests = Path(__file__).parents[1]
    use_libyaml()
    gc.disable()  # imports leave little garbage
    for name in _PRELOADED:
        importlib.import_module(name)
    tools = folder / ("bare" if os.fork() else "full")
    sys.path[0] = str(tests.parent)
    for name in _PRELOADED_UNLESS_BARE if tools.name == "full" else ():
        importlib.import_module(name)
    _use_hydra(tests.parent / "conf")
    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends when its parent does
    server = _Server(str(tools / "socket"))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if (request := server.serve()) is not None:
        _become(tools / "python", **request)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _client(*sys.argv[1:4], sys.argv[4:])
    _main(Path(sys.argv[1]))
