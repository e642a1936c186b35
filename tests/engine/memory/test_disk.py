"""The spill file and its copies: bytes come back, failures are reported, and nothing is left on the disk."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_memo.artifacts import slot_layouts as disk_layout
from lightning_memo.artifacts.slot_layouts import BLOCK_BYTES, DiskLayout
from lightning_memo.engine import TestMode
from lightning_memo.engine.copy_streams import CopyEvent, ThreadCopyStream
from lightning_memo.engine.memory import disk
from lightning_memo.engine.memory.disk import DiskError, DiskFile, DiskStore

CPU = torch.device("cpu")
SLOT_BYTES = 5 * BLOCK_BYTES - 100  # five chunks, the last one not full
SLOTS = 3
DELAYS = TestMode(seed=0, longest_delay_seconds=0.002)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_layout, "_CHUNK_BYTES", BLOCK_BYTES)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    sizes = DiskLayout(SLOT_BYTES)
    store = DiskStore(tmp_path, SLOTS * sizes.region_bytes, sizes, CPU, DELAYS)
    yield store
    store.close()


def slots() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (SLOT_BYTES,), dtype=torch.uint8, generator=generator) for _ in range(SLOTS)]


def descriptor_in(folder: Path) -> int:
    """The descriptor of the file without a name that this process has open in `folder`."""
    links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    (descriptor,) = (int(path.name) for path in links if str(path.readlink()).startswith(f"{folder}{os.sep}"))
    return descriptor


def there_and_back(store: DiskStore, sources: list[Tensor]) -> list[Tensor]:
    """Write all slots from a device buffer that is reused, and read them back into it, the last one first."""
    buffer, arrived = torch.empty(SLOT_BYTES, dtype=torch.uint8), []
    rooms = []
    for source in sources:
        buffer.copy_(source)
        room = store.take(SLOT_BYTES)
        assert room is not None
        room.write(buffer).wait()
        rooms.append(room)
    for room in reversed(rooms):
        buffer.fill_(1)
        room.read(buffer).wait()
        arrived.insert(0, buffer.clone())
        room.release()
    return arrived


# ---- there and back


def test_bytes_come_back(store: DiskStore) -> None:
    assert store.host_bytes == 7 * BLOCK_BYTES
    for _ in range(2):
        assert all(map(torch.equal, there_and_back(store, slots()), slots()))
    assert store.file.space.bytes_in_use == 0


def test_the_file_is_of_the_planned_size_and_its_space_is_reserved(store: DiskStore) -> None:
    status = os.fstat(descriptor_in(store.file.folder))
    assert status.st_size == SLOTS * 5 * BLOCK_BYTES <= status.st_blocks * 512
    assert [store.take(SLOT_BYTES) is None for _ in range(SLOTS + 1)] == [False] * SLOTS + [True]


class Heedless:
    """An event whose waits return immediately."""

    def __init__(self, event: CopyEvent) -> None:
        self._event = event

    def wait(self) -> None:
        return

    synchronize = wait


class HeedlessStream(ThreadCopyStream):
    """A broken copy stream, whose copies appear to have ended immediately."""

    def copy_after(self, *arguments: Any, **subject: Any) -> CopyEvent:
        return Heedless(super().copy_after(*arguments, **subject))


@pytest.mark.parametrize("broken", ["spill", "unspill"])
def test_a_missing_wait_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def make(device: torch.device, name: str, *arguments: Any) -> ThreadCopyStream:
        return (HeedlessStream if name == broken else ThreadCopyStream)(name, *arguments)

    monkeypatch.setattr(disk, "make_copy_stream", make)
    sizes = DiskLayout(SLOT_BYTES)
    store = DiskStore(tmp_path, SLOTS * sizes.region_bytes, sizes, CPU, TestMode(0, 0.02))
    assert not all(map(torch.equal, there_and_back(store, slots()), slots()))
    store.close()


def test_without_direct_io_bytes_come_back_too_and_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, command: int, argument: int = 0) -> int:
        if command == disk.fcntl.F_SETFL:
            raise OSError(errno.EINVAL, "Invalid argument")
        return 0

    monkeypatch.setattr(disk.fcntl, "fcntl", refuse)
    sizes = DiskLayout(SLOT_BYTES)
    with pytest.warns(UserWarning, match="without direct I/O"):
        store = DiskStore(tmp_path, SLOTS * sizes.region_bytes, sizes, CPU)
    assert all(map(torch.equal, there_and_back(store, slots()), slots()))
    store.close()


# ---- failures


@pytest.fixture
def short_files() -> Iterator[None]:
    """Files of this process may not be larger than a few blocks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * BLOCK_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_limit_on_files_gives_one_clear_line(tmp_path: Path, short_files: None) -> None:
    with pytest.raises(DiskError) as caught:
        DiskFile(tmp_path, 5 * BLOCK_BYTES)
    message = str(caught.value)
    assert "\n" not in message
    assert f"needs a file of 20.0 KiB (20480 bytes) in {tmp_path}, and files" in message and "ulimit -f" in message
    DiskFile(tmp_path, 4 * BLOCK_BYTES).close()  # what fits still works


def test_more_than_is_free_is_refused_before_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("would take all that is free"))
    with pytest.raises(DiskError, match=r"needs 4\.0 PiB .* free \(No space left on device\): free space"):
        DiskFile(tmp_path, 2**52)


@pytest.mark.parametrize("folder", ["/proc", "missing", "file"])
def test_a_folder_that_takes_no_files_is_told(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r'disk_path=".*(proc|missing|file)": no file can be created there \(.*\): give'
    ):
        DiskFile(tmp_path / folder, BLOCK_BYTES)


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_disk_that_fails_is_told_where_bytes_are_needed(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(os, call, failing_after(2, getattr(os, call)))
    with pytest.raises(DiskError, match=r"spill file in .* failed: No space left on device; the step is lost"):
        there_and_back(store, slots())
    monkeypatch.undo()
    store.abandon()


def failing_after(calls: int, system_call: Callable[..., int]) -> Callable[..., int]:
    """A system call that fails after some calls."""
    count = iter(range(10**6))

    def call(*arguments: object) -> int:
        if next(count) >= calls:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return system_call(*arguments)

    return call


# ---- what is left on the disk


def own(folder: Path, ready: Connection) -> None:
    """A process that has a spill file until it gets a message."""
    file = DiskFile(folder, BLOCK_BYTES)
    ready.send(([path.name for path in file.folder.iterdir()], os.fstat(descriptor_in(folder)).st_nlink))
    ready.recv()
    raise KeyError("an exception")


def test_nothing_is_left_when_processes_end(tmp_path: Path) -> None:
    """One process ends with an exception, and one is killed; both have a file in the folder."""
    (tmp_path / "lightning_memo_notes").touch()  # not ours, whatever its name
    context = multiprocessing.get_context("fork")
    owners = []
    for _ in range(2):
        here, there = context.Pipe()
        owner = context.Process(target=own, args=(tmp_path, there))
        owner.start()
        owners.append(owner)
        # No name leads to the file and no other process has it open, so the kernel frees it with the process.
        assert here.poll(60) and here.recv() == (["lightning_memo_notes"], 0)
    owners[0].kill()
    here.send("end")
    for owner in owners:
        owner.join()
    assert [owner.exitcode for owner in owners] == [-signal.SIGKILL, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["lightning_memo_notes"]
    DiskFile(tmp_path, BLOCK_BYTES).close()


def test_closing_gives_the_space_back_though_a_child_has_the_file_open(tmp_path: Path) -> None:
    file = DiskFile(tmp_path, BLOCK_BYTES)
    inherited = os.dup(descriptor_in(tmp_path))
    assert os.fstat(inherited).st_blocks > 0
    file.close()
    assert os.fstat(inherited).st_blocks == 0
    os.close(inherited)
