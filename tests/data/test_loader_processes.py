"""Workers of a loader end with the process that loads, when that is killed, and leave nothing in shared memory."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.commands import environment
from support.markers.slow import slow_if

from lightning_memo.data.resumable_loader import ResumableLoader, SequenceDataset

WAIT_SECONDS = 60.0


class Rows(SequenceDataset):
    """Rows of a tensor, and of bytes that fill a pipe unless somebody reads them."""

    tokens = 0

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"row": torch.zeros(1 << 18), "text": b"x" * 300_000}  # type: ignore[dict-item]


def load() -> None:
    """Read some rows with two workers, and then no more."""
    batches = iter(ResumableLoader(Rows(), batch_size=1, seed=0, num_workers=2))
    for _ in range(3):
        next(batches)
    sys.stdout.write("loading\n")
    sys.stdout.flush()
    time.sleep(1000)


def descendants(process: int) -> set[int]:
    """Process numbers of those that a process has started, and those have started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found, new = set(), {process}
    while new:
        new = {child for child, parent in parents.items() if parent in new}
        found |= new
    return found


@slow_if(lambda method: method == "forkserver")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_no_worker_outlives_a_kill(method: str) -> None:
    process = subprocess.Popen(
        [sys.executable, __file__, method], stdout=subprocess.PIPE, env=environment(cold=True), start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"loading\n"
    workers = descendants(process.pid)
    assert len(workers) >= 2
    process.send_signal(signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + WAIT_SECONDS
    try:
        while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()]
        shared = [path.name for path in Path("/dev/shm").iterdir()]
        assert not [name for name in shared for each in (process.pid, *workers) if name.startswith(f"torch_{each}_")]
    finally:
        for worker in workers:
            if Path(f"/proc/{worker}").exists():
                os.kill(worker, signal.SIGKILL)


if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    multiprocessing.set_forkserver_preload(["pytest", "support.commands", "lightning_memo.data.resumable_loader"])
    load()
