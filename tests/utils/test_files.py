"""The cache folder: code is loaded from it, so that only this user may write to it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lightning_memo.utils import files
from lightning_memo.utils.files import user_cache
from lightning_memo.utils.native_build import BuildError, find_compiler

OTHERS = stat.S_IRWXG | stat.S_IRWXO
PLANTED = "planted.so"
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")


@pytest.fixture(autouse=True)
def _new_process() -> None:
    """Warnings are given, and the temporary folder is made, once in a process."""
    files._warn_once.cache_clear()
    files._temporary_cache.cache_clear()


@pytest.fixture(params=["XDG_CACHE_HOME", "HOME", "no home"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the cache is, for each way in which it is found."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    tmp_path.chmod(0o1777)
    if request.param == "no home":
        monkeypatch.setattr("os.path.expanduser", lambda path: path)  # the user ID has no entry in the password file
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        return tmp_path / f"cache-{os.getuid()}"
    monkeypatch.setenv(request.param, str(tmp_path))
    return tmp_path / ".cache" if request.param == "HOME" else tmp_path


def warned(name: str = "native") -> tuple[Path, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = user_cache(name)
        assert user_cache(name) == folder, "later calls return the same folder, and say nothing"
    return folder, [str(each.message) for each in caught]


def test_only_this_user_can_write_to_the_folder(root: Path) -> None:
    before = os.umask(0)
    try:
        folder, lines = warned()
    finally:
        os.umask(before)
    assert (folder, lines) == (root / "lightning_memo" / "native", [])
    made = [folder, folder.parent] + [root] * (root.name.startswith("cache-"))
    assert not any(each.stat().st_mode & OTHERS for each in made)
    (folder / "kept.so").touch()
    assert warned() == (folder, []) and (folder / "kept.so").exists()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o775])
@pytest.mark.parametrize("place", ["lightning_memo", "lightning_memo/native"])
def test_a_folder_that_others_could_write_to_is_made_again(root: Path, place: str, mode: int) -> None:
    folder = root / "lightning_memo" / "native"
    folder.mkdir(parents=True)
    root.chmod(0o700)
    (folder / PLANTED).touch()
    (root / place).chmod(mode)
    found, lines = warned()
    assert found == folder and not list(folder.iterdir())
    assert not folder.stat().st_mode & 0o022 and not folder.parent.stat().st_mode & 0o022
    (line,) = lines
    assert line.startswith(str(root / place)) and "made again" in line and "\n" not in line
    assert not list(root.rglob(PLANTED)), "nothing of it is left"


def check_temporary(found: Path, lines: list[str], foreign: Path) -> None:
    assert not found.is_relative_to(foreign)
    assert not found.parent.stat().st_mode & OTHERS and found.parent.stat().st_uid == os.getuid()
    (line,) = lines
    assert line.startswith(str(foreign)) and "set XDG_CACHE_HOME" in line and "\n" not in line


@as_root
@pytest.mark.parametrize("place", ["lightning_memo", "lightning_memo/native"])
@pytest.mark.parametrize("mode", [0o700, 0o777])
def test_a_folder_of_another_user_is_not_used(root: Path, place: str, mode: int) -> None:
    (root / "lightning_memo" / "native").mkdir(parents=True)
    root.chmod(0o700)
    (root / "lightning_memo" / "native" / PLANTED).touch()
    (root / place).chmod(mode)
    os.chown(root / place, 12345, -1)
    found, lines = warned()
    check_temporary(found, lines, root / place)
    assert list(root.rglob(PLANTED)), "nor is it changed"


@as_root
def test_a_link_of_another_user_is_not_followed(root: Path, tmp_path: Path) -> None:
    """Where it points to can change after it was looked at."""
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    root.mkdir(exist_ok=True, mode=0o700)
    link = root / "lightning_memo"
    link.symlink_to(mine)
    os.chown(link, 12345, -1, follow_symlinks=False)
    found, lines = warned()
    check_temporary(found, lines, link)
    assert not list(mine.iterdir())


def test_a_link_of_this_user_is_followed(root: Path, tmp_path: Path) -> None:
    mine = tmp_path / "scratch"
    mine.mkdir(mode=0o700)
    root.mkdir(exist_ok=True, mode=0o700)
    (root / "lightning_memo").symlink_to(mine)
    folder, lines = warned()
    assert (folder.resolve(), lines) == (mine / "native", [])


def test_a_root_that_is_no_folder_is_left_to_whoever_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert warned() == (tmp_path / "file" / "lightning_memo" / "native", [])


CODE = """
import sys
from pathlib import Path
from lightning_memo.utils import native_build
import ctypes
print(native_build.load("answer", [Path(sys.argv[1])], {"answer": (ctypes.c_int,)}).answer())
"""


@as_root
def test_a_library_of_another_user_is_not_run(tmp_path: Path) -> None:
    """A process without a home loads what it compiled, and not what somebody else put under the same name."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    source = tmp_path / "answer.cpp"
    for answer in (13, 42):  # the planted one is compiled from another source, and gets the name of the right one
        source.write_text(f'extern "C" __attribute__((visibility("default"))) int answer() {{ return {answer}; }}\n')
        names = {name: str(tmp_path) for name in ("TMPDIR", "XDG_CACHE_HOME")}
        done = run(CODE, source, names)
        assert done.stdout == f"{answer}\n", done.stderr
    native = tmp_path / "lightning_memo" / "native"
    first, second = sorted(native.glob("answer-*.so"), key=lambda path: path.stat().st_mtime_ns)
    second.write_bytes(first.read_bytes())
    planted = tmp_path / "cache-0"
    planted.mkdir(mode=0o777)
    (tmp_path / "lightning_memo").rename(planted / "lightning_memo")
    for path in [planted, *planted.rglob("*")]:
        os.chown(path, 12345, -1)
    without_home = "import pathlib\ndef home():\n    raise RuntimeError\npathlib.Path.home = home\n"
    done = run(without_home + CODE, source, {"TMPDIR": str(tmp_path)})
    assert done.stdout == "42\n", done.stderr
    assert "other users can write to this folder" in done.stderr
    assert not list(tmp_path.glob("lightning_memo-*")), "the temporary folder is removed"


def run(code: str, source: Path, names: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), **names}
    command = [sys.executable, "-c", code, str(source)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
