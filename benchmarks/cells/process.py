"""A process for each cell, so that a failure, such as running out of memory, ends only that cell."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from cells.cell import Cell, Effort, Result
from lightning_memo.utils.process import exit_with_parent

_IMPORTS = ["cells.training", "transformers.models.llama.modeling_llama", "peft"]
_LONGEST_OUTPUT = 4000
_DRIVER_REFUSES = "CUDA error: out of memory"
_KILLED = "the process was ended by SIGKILL, as the kernel does where the host's memory runs out"


def run_cell(cell: Cell, effort: Effort, seconds: float, command: Sequence[str]) -> Result:
    """Measures a cell in its own process.

    Args:
        cell: The cell.
        effort: How many steps are measured.
        seconds: Time limit of the process.
        command: The command that is recorded in the result.

    Returns:
        The result. Its `status` is "ok", "oom" (device), "oohm" (host), "timeout", "unavailable" or "error", and
        `reason` has details. It includes everything that was measured before the process ended.
    """
    context = _quickly_started()
    pipe, there = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="cell-") as folder:
        output = Path(folder) / "output.txt"
        output.touch()
        process = context.Process(target=_serve, args=(there, cell, effort, list(command), output), name="cell")
        started = time.monotonic()
        process.start()
        there.close()
        try:
            known, ended = _receive(pipe, started + seconds)
        finally:
            if process.is_alive():
                _end(process)
            process.join()
        if not ended:
            known |= {"status": "timeout", "reason": f"not over after {seconds:.0f} s"}
        elif "status" not in known:
            known |= _how_it_ended(process.exitcode)
        if known["status"] == "error":
            known["output"] = output.read_text(errors="replace")[-_LONGEST_OUTPUT:]
        known["wall_seconds"] = round(time.monotonic() - started, 1)
    return known


def device_name(device: str) -> str:
    """Returns the name of a device. A separate process reads it, because reading it takes some memory of a GPU.

    Raises:
        ValueError: There is no such device.
    """
    context = _quickly_started()
    pipe, there = context.Pipe(duplex=False)
    process = context.Process(target=_send_name, args=(there, device), name="device")
    process.start()
    there.close()
    name = pipe.recv()
    process.join()
    if name is None:
        raise ValueError(f"--device {device}: PyTorch finds no GPU; --plan smoke, or --device cpu, runs without one")
    return str(name)


def _send_name(pipe: Connection, device: str) -> None:
    import torch
    from circumstances import cpu_name

    if device == "cpu":
        pipe.send(cpu_name())
    else:
        pipe.send(torch.cuda.get_device_name() if torch.cuda.is_available() else None)


def _quickly_started() -> Any:
    """Returns a context whose processes start from one that has imported everything but not touched the device."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a library that looks for GPUs must not start CUDA before a fork
    here, path = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
    if here not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [path])])
    return context


def _receive(pipe: Connection, deadline: float) -> tuple[Result, bool]:
    """Returns the last report of the process, and whether it finished before the deadline."""
    known: Result = {}
    with contextlib.suppress(EOFError, OSError):
        while pipe.poll(max(deadline - time.monotonic(), 0.0)):
            known |= pipe.recv()
        return known, "status" in known
    return known, True


def _end(process: Any) -> None:
    """Ends a process with all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _how_it_ended(status: int | None) -> Result:
    if status == -signal.SIGKILL:
        return {"status": "oohm", "reason": _KILLED}
    return {"status": "error", "reason": f"the process ended with status {status}"}


def _serve(pipe: Connection, cell: Cell, effort: Effort, command: list[str], output: Path) -> None:
    os.setsid()  # processes that it starts, for example compilers, end with it
    exit_with_parent(output.parent)
    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # the OOM killer's first choice
    sys.argv = command
    tempfile.tempdir = str(output.parent)  # removed with it, even if this process is killed
    os.environ["HF_HUB_OFFLINE"] = "1"
    pipe.send(_measure(cell, effort, pipe))


def _measure(cell: Cell, effort: Effort, pipe: Connection) -> Result:
    import torch
    from circumstances import circumstances, cpu_name
    from peers import Unavailable

    from cells.training import train
    from lightning_memo.planner.storage_planner import StorageError
    from lightning_memo.trials.training_trial import is_out_of_memory

    if cell.device == "cpu":
        torch.set_num_threads(1)
    device = torch.cuda.get_device_name() if cell.device == "cuda" else cpu_name()
    pipe.send({**circumstances(("torch", "transformers", "lightning", "lightning_memo")), "device": device})
    try:
        return {**train(cell, effort, pipe.send), "status": "ok", "reason": ""}
    except Unavailable as error:
        return {"status": "unavailable", "reason": str(error)}
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        if _DRIVER_REFUSES in reason:  # pinned memory; the device allocator has another message
            return {"status": "oohm", "reason": reason}
        if isinstance(error, StorageError):
            return {"status": "oom", "reason": reason}
        if is_out_of_memory(error):
            return {"status": "oom" if "CUDA" in reason else "oohm", "reason": reason}
        traceback.print_exc()
        return {"status": "error", "reason": reason}
