"""Files and folders are replaced as a whole or not at all, and disks that refuse are reported in one line."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from support.disks import limited_files, mounted, remount

from lightning_memo.utils import files
from lightning_memo.utils.files import OutputFile, WriteError, commit, explained, remove, replacing, unfinished

LARGE = "x" * 2**20


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def write(path: Path, text: str = LARGE) -> None:
    with replacing(path) as written:
        written.write_text(text)


def write_tensors(path: Path) -> None:
    """As exports do, by a library in Rust."""
    with replacing(path) as written:
        save_file({"a": torch.ones(2**18)}, written)


def write_by_torch(path: Path) -> None:
    """Torch hides the error of a disk behind one of its own."""
    with replacing(path) as written, OutputFile(written) as file:
        torch.save(torch.ones(2**18), file)


WRITERS = [write, write_tensors, write_by_torch]


def refusal(writer: Callable[[Path], None], path: Path, number: int) -> str:
    with pytest.raises(WriteError) as refused:
        writer(path)
    message = str(refused.value)
    assert message.startswith(f"{path} cannot be written ({os.strerror(number)}): ") and "\n" not in message
    assert refused.value.errno == number
    return message


@pytest.mark.parametrize("writer", WRITERS)
def test_full_and_read_only_disks(tmp_path: Path, writer: Callable[[Path], None]) -> None:
    with mounted(tmp_path / "disk", "256k") as disk:
        write(disk / "file", "old")
        assert "free space there" in refusal(writer, disk / "file", errno.ENOSPC)
        assert names_in(disk) == {"file"} and (disk / "file").read_text() == "old"
        write(disk / "file", "new")
        remount(disk, "ro")
        assert "read-only" in refusal(writer, disk / "file", errno.EROFS)
        assert "read-only" in refusal(writer, disk / "folder" / "file", errno.EROFS)
        assert (disk / "file").read_text() == "new"


@pytest.mark.parametrize("writer", WRITERS)
def test_limits_of_the_size_of_files(tmp_path: Path, writer: Callable[[Path], None]) -> None:
    with limited_files(1000):
        assert "ulimit -f" in refusal(writer, tmp_path / "file", errno.EFBIG)
    assert not names_in(tmp_path)


def test_other_reasons(tmp_path: Path) -> None:
    write(tmp_path / "file")
    refusal(write, tmp_path / "file" / "inner", errno.EEXIST)
    refusal(write, tmp_path / "file" / "inner" / "inner", errno.ENOTDIR)
    assert "shorter" in refusal(write, tmp_path / ("x" * 300), errno.ENAMETOOLONG)
    for number in (errno.EACCES, errno.EPERM, errno.EDQUOT, errno.EIO):
        with mock.patch.object(os, "fsync", side_effect=OSError(number, os.strerror(number))):
            refusal(write, tmp_path / "other", number)
    assert names_in(tmp_path) == {"file"}


def test_errors_of_what_is_read_keep_their_message(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"picture\.png"), replacing(tmp_path / "page") as page:
        page.write_bytes((tmp_path / "picture.png").read_bytes())
    with pytest.raises(OSError, match=r"^no header$"), replacing(tmp_path / "page"):
        raise OSError("no header")
    with pytest.raises(WriteError, match=r"metrics\.csv cannot be written \(No space"), explained(tmp_path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "metrics.csv")
    assert not names_in(tmp_path)


def test_what_killed_processes_left_is_swept_unless_somebody_writes(tmp_path: Path) -> None:
    left = tmp_path / ".unfinished" / "12345678" / "a.csv"
    left.parent.mkdir(parents=True)
    left.write_text("torn")
    with replacing(tmp_path / "b.csv") as first:
        assert not left.exists()
        first.write_text("b")
        with replacing(tmp_path / "c.csv") as second:
            second.write_text("c")
        assert first.exists()
    assert names_in(tmp_path) == {"b.csv", "c.csv"}


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    """Each replaces the whole file, and none removes what another one writes."""
    errors: list[BaseException] = []

    def write_often(text: str) -> None:
        try:
            for _ in range(50):
                write(tmp_path / "file", text * 1000)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=write_often, args=(letter,)) for letter in "abcd"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if (tmp_path / "file").exists():
            text = (tmp_path / "file").read_text()
            assert len(text) == 1000 and len(set(text)) == 1
    assert not errors and names_in(tmp_path) == {"file"}


def test_file_systems_without_locks(tmp_path: Path) -> None:
    with mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "No locks available")):
        write(tmp_path / "file", "new")
    assert names_in(tmp_path) == {"file"}


def test_a_folder_takes_the_place_of_an_empty_one_and_leaves_others_alone(tmp_path: Path) -> None:
    """A name like that of a predecessor is the user's."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model.previous").mkdir()
    (tmp_path / "model.previous" / "notes").write_text("precious")
    with unfinished(tmp_path / "model") as written:
        written.mkdir()
        (written / "config").write_text("new")
        commit(written, tmp_path / "model")
    assert (tmp_path / "model" / "config").read_text() == "new"
    assert (tmp_path / "model.previous" / "notes").read_text() == "precious"
    remove(tmp_path / "model")
    assert names_in(tmp_path) == {"model.previous"}


def test_everything_is_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def flush(descriptor: int) -> None:
        done.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        sync(descriptor)

    def rename(self: Path, target: Path) -> Path:
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(files.os, "fsync", flush)
    monkeypatch.setattr(Path, "replace", rename)
    write(tmp_path / "file", "new")
    assert done == ["file", "rename", tmp_path.name]
    done.clear()
    with unfinished(tmp_path / "folder") as written:
        (written / "inner").mkdir(parents=True)
        (written / "inner" / "a").write_text("a")
        commit(written, tmp_path / "folder")
    assert done == ["inner", "a", "folder", "rename", tmp_path.name]
