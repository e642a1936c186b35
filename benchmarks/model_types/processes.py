"""Processes for each model type, so that a crash or an endless loop ends only one level of one type."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from lightning_memo.utils.process import exit_with_parent

_IMPORTS = [
    "torch",
    "transformers",
    "lightning.pytorch",
    "torch.distributed.tensor",
    "model_types.outcomes",
    "model_types.processes",
]
Report = dict[str, Any]


def train_type(kind: str, model_type: str, levels: Sequence[str], seconds: float) -> Report:
    """Trains a tiny model of a type at levels that need the same number of processes.

    Args:
        kind: Kind of the model.
        model_type: Its type.
        levels: Names of the levels.
        seconds: Time limit for each of them.

    Returns:
        The outcomes by level as `levels`, and what was built; or `not_built`, the reason why nothing was.
    """
    known: Report = {"levels": {}}
    left = list(levels)
    while left and "not_built" not in known:
        ended = _run(kind, model_type, left, seconds, known)
        left = [level for level in left if level not in known["levels"]]
        if ended and left and "not_built" not in known:
            if "parameters" in known:
                known["levels"][left.pop(0)] = {"status": "crash", "why": ended}
            else:
                known["not_built"] = ended
    return known


def _run(kind: str, model_type: str, levels: Sequence[str], seconds: float, known: Report) -> str:
    """Adds to what is known until all levels are over. Returns why the processes ended before that; else nothing."""
    from model_types.levels import LEVELS

    size, port = LEVELS[levels[0]].processes, _free_port()
    context = _quickly_started()
    pipes, processes = [], []
    with tempfile.TemporaryDirectory(prefix="model-") as folder:
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            arguments = (there, kind, model_type, list(levels), (rank, size, port), folder)
            processes.append(context.Process(target=_serve, args=arguments, name=model_type))
            processes[-1].start()
            there.close()
            pipes.append(here)
        try:
            return _receive(pipes, processes, seconds, known)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _receive(pipes: Sequence[Connection], processes: Sequence[Any], seconds: float, known: Report) -> str:
    while True:
        answers = []
        deadline = time.monotonic() + seconds
        for pipe, process in zip(pipes, processes, strict=True):
            if not wait([pipe], timeout=max(deadline - time.monotonic(), 0.0)):
                return f"not over after {seconds:.0f} s"
            try:
                answers.append(pipe.recv())
            except EOFError:
                process.join(10)
                return f"the process ended with status {process.exitcode}"
        if answers[0] is None:
            return ""
        _add(known, answers)


def _add(known: Report, answers: Sequence[Report]) -> None:
    """Adds the answers of all processes. Of outcomes, the worst counts."""
    order = ("crash", "wrong", "refused", "plain", "whole", "works")
    first = answers[0]
    known |= {name: value for name, value in first.items() if name != "levels"}
    for level in first.get("levels", {}):
        found = [answer["levels"][level] for answer in answers]
        known["levels"][level] = min(found, key=lambda outcome: order.index(outcome["status"]))


def _quickly_started() -> Any:
    """Returns a context whose processes start from one that has imported everything."""
    here, path = str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")
    if here not in path.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [path])])
    os.environ["HF_HUB_OFFLINE"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTS)
    return context


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _serve(
    pipe: Connection, kind: str, model_type: str, levels: Sequence[str], place: tuple[int, int, int], folder: str
) -> None:
    exit_with_parent(Path(folder))
    os.chdir(folder)  # plans are saved there
    rank, size, port = place
    if size > 1:
        os.environ.update(
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0",
            WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size), TORCHELASTIC_RUN_ID="models",
        )  # fmt: skip
    with Path("output.txt").open("a") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    _train(pipe, kind, model_type, levels, size)


def _train(pipe: Connection, kind: str, model_type: str, levels: Sequence[str], size: int) -> None:
    import torch
    import transformers

    from lightning_memo.profiler import measured_costs
    from model_types.levels import LEVELS
    from model_types.outcomes import References, outcome_of
    from model_types.training import make_example

    torch.set_num_threads(1)
    measured_costs._BANDWIDTH_SECONDS = 0.005  # results do not depend on the speed of copies
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    try:
        example = make_example(kind, model_type)
        references = References(example)
    except Exception as error:
        traceback.print_exc()
        pipe.send({"not_built": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"})
        pipe.send(None)
        return
    pipe.send({"inputs": example.inputs, "parameters": sum(p.numel() for p in example.model.parameters())})
    for level in levels:
        outcome = outcome_of(example, LEVELS[level], references, size)
        pipe.send({"levels": {level: outcome.to_json()}})
    pipe.send(None)
    with contextlib.suppress(EOFError, OSError):
        sys.stdout.flush()
