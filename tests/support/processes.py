"""Run a function in several processes that communicate through gloo (NCCL on CUDA), and return its results.

Starting a process takes seconds. A group of processes therefore stays alive for all tests, and ends after a failure.
"""

from __future__ import annotations

import atexit
import datetime as dt
import faulthandler
import gc
import multiprocessing
import multiprocessing.context
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_memo.profiler import measured_costs as costs
from support.devices import BACKEND, DEVICE, nothing_hidden
from support.warm import exempt_from_collection, look_up_once

_GRACE_SECONDS = 60.0
# Every device mesh leaves process groups behind, each with its own threads.
_MOST_CALLS = 150
_FAMILIES = ("gemma", "gemma3", "gpt2", "gpt_neox", "llama", "mistral", "mixtral", "qwen3")
# Each process imports what the fork server has not imported: peft and one model family take 2 CPU seconds.
_PRELOADED = [
    "torch", "torch.profiler", "transformers", "lightning.pytorch", "lightning_memo.strategy", "pytest", "hypothesis",
    "peft", "safetensors.torch", "rich._emoji_codes",
    *(f"transformers.models.{family}.modeling_{family}" for family in _FAMILIES),
]  # fmt: skip


class _SharedLoop(dist.ProcessGroupGloo):
    """A gloo group that shares its event loop with all other groups; a thread for each group would poll constantly."""

    device: Any = None

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: dt.timedelta, **later: Any) -> None:
        # Later versions of PyTorch say more, of what no test uses.
        assert not any(later.values())
        if _SharedLoop.device is None:
            _SharedLoop.device = dist.ProcessGroupGloo.create_default_device()
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [_SharedLoop.device], timeout
        super().__init__(store, rank, size, options)


def forking() -> multiprocessing.context.ForkServerContext:
    """Return a context that starts processes in which all libraries are already imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


class ProcessError(AssertionError):
    """The tracebacks of the processes of a group, by rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"---- rank {rank}\n{text}" for rank, text in sorted(errors.items())))


class Group:
    """Processes that wait for functions to run.

    Args:
        size: Number of processes.
        timeout_seconds: Time after which a collective fails if another process does not take part.

    Attributes:
        calls: Number of functions that were run.
    """

    def __init__(self, size: int, timeout_seconds: float = 120.0) -> None:
        context = forking()
        # In this process, so that no other one can take the port before the group listens on it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes = []
        self._folder = tempfile.TemporaryDirectory(prefix="processes-")
        self.calls = 0
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(there, rank, size, self._store.port, timeout_seconds, self._folder.name),
                daemon=True,
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, seconds: float = 300.0, **kwargs: Any) -> list[Any]:
        """Call a function, importable by name, in every process, and return the results by rank.

        Raises:
            ProcessError: A process raised, ended, or did not answer in time.
        """
        self.calls += 1
        for pipe in self._pipes:
            pipe.send((function, args, kwargs))
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = dt.datetime.now() + dt.timedelta(seconds=seconds)
        pending = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        while pending:
            left = (deadline - dt.datetime.now()).total_seconds()
            ready = wait(list(pending), timeout=max(left, 0.0))
            if not ready:
                errors |= dict.fromkeys(pending.values(), "no answer")
                break
            for pipe in ready:
                rank = pending.pop(pipe)
                try:
                    error, results[rank] = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    error = self._how_it_ended(rank)
                if error is not None:
                    errors[rank] = error
                    # The other processes may wait for this one in a collective.
                    deadline = min(deadline, dt.datetime.now() + dt.timedelta(seconds=_GRACE_SECONDS))
        if errors:
            self.stop()
            raise ProcessError(errors)
        return [results[rank] for rank in range(len(self._pipes))]

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(_GRACE_SECONDS)
        stack = _stack_file(self._folder.name, rank).read_text()
        return f"the process ended with exit code {process.exitcode} (-N: by signal N)\n{stack}"

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


_groups: dict[int, Group] = {}


def run_in_processes(size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Call `function(*args, **kwargs)` in each of `size` processes, which form the default process group.

    Args:
        size: Number of processes.
        function: Function that can be imported by name. Its arguments and its result must be picklable.

    Returns:
        The result of each process, by rank.

    Raises:
        ProcessError: A process raised, ended, or did not answer in time. The group is then stopped.
    """
    group = _groups.get(size)
    if group is not None and group.calls >= _MOST_CALLS:
        group.stop()
    if group is None or not group.alive:
        group = _groups[size] = Group(size)
    return group.run(function, *args, **kwargs)


def stop_all() -> None:
    """End all processes."""
    for group in _groups.values():
        group.stop()
    _groups.clear()


atexit.register(stop_all)


def _stack_file(folder: str, rank: int) -> Path:
    """Return the file that gets the Python stack of a process that crashes."""
    return Path(folder, f"stack_{rank}.txt")


def _serve(pipe: Connection, rank: int, size: int, port: int, timeout_seconds: float, folder: str) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0",
        WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), TORCHELASTIC_RUN_ID="tests", OMP_NUM_THREADS="1",
    )  # fmt: skip
    torch.set_num_threads(1)
    look_up_once()
    faulthandler.enable(_stack_file(folder, rank).open("w"))
    gc.freeze()  # what has been imported is never garbage
    os.chdir(folder)  # trainers write their default files there
    costs._BANDWIDTH_SECONDS = 0.005  # tests of results need no precise measurement
    distributed_c10d.ProcessGroupGloo = _SharedLoop
    timeout = dt.timedelta(seconds=timeout_seconds)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=size, timeout=timeout)
    while True:
        exempt_from_collection()
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            with nothing_hidden():
                answer = (None, function(*args, **kwargs))
        except BaseException:
            answer = (traceback.format_exc(), None)
        pipe.send_bytes(pickle.dumps(answer))  # `send` shares every tensor, by a connection of its own
