"""`make test` and `make test-slow` together run every case once; CI runs all of the first and parts of the others."""

from __future__ import annotations

import itertools
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest
from support.markers.part import Part
from support.markers.slow import COLLECTED, mark_slow, without_quick_case
from support.paths import ROOT, TESTS


def commands() -> list[list[str]]:
    """Return the arguments of the pytest commands that both targets run."""
    told = subprocess.run(
        ["make", "--no-print-directory", "-n", "test", "test-slow"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = [shlex.split(line) for line in told.stdout.splitlines() if " -m pytest " in line]
    return [words[words.index("pytest") + 1 :] for words in lines]


def runs(arguments: list[str], path: Path) -> bool:
    """Return whether a command runs a file, with cases of any marker."""
    ignored = {ROOT / word.removeprefix("--ignore=") for word in arguments if word.startswith("--ignore=")}
    given = {ROOT / word for word in arguments if word.startswith("tests")}
    return bool(given & {path, *path.parents}) and not ignored & {path, *path.parents}


def test_every_file_is_run_once() -> None:
    markers = defaultdict(list)
    for arguments in commands():
        marker = arguments[arguments.index("-m") + 1] if "-m" in arguments else "all"
        for path in TESTS.rglob("test_*.py"):
            markers[path] += [marker] * runs(arguments, path)
    wrong = {path: markers[path] for path in TESTS.rglob("test_*.py") if markers[path] not in RIGHT}
    assert not wrong, wrong


RIGHT = (["not slow", "slow"], ["all"])


@pytest.mark.slow
def test_cases_are_collected_where_no_headers_of_cuda_builds_were_fetched(tmp_path: Path) -> None:
    """As by `make test` in a new checkout. CI and developers have the headers."""
    shutil.copytree(TESTS, tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "setup.cfg").symlink_to(ROOT / "setup.cfg")
    files = [path.relative_to(ROOT) for path in TESTS.rglob("test_*.py") if 'ROOT / ".cuda"' in path.read_text()]
    assert len(files) > 1
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *map(str, files)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ci_runs_all_targets() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert {"make test", "make test-slow PART=$part", "make test-cuda PART=$part"} <= set(lines)


def test_each_case_is_in_one_part() -> None:
    cases = [mock.Mock(nodeid=f"tests/test_a.py::test_b[{number}]") for number in range(402)]
    parts = [list(cases) for _ in range(4)]
    for number, part in enumerate(parts, start=1):
        Part(number, 4).select(mock.Mock(), part)
    assert [len(part) for part in parts] == [101, 101, 100, 100]
    assert {case.nodeid for case in itertools.chain(*parts)} == {case.nodeid for case in cases}
    assert all({case in part for case in cases[:100]} == {True, False} for part in parts)  # neighbours are in several


def test_a_part_is_selected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_parts.py").write_text(TESTS_OF_ANOTHER_RUN)
    monkeypatch.chdir(tmp_path)

    def names(part: Part | None) -> list[str]:
        seen = Collects(part)
        assert pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "."], [seen]) in (0, 5)
        return [item.name for item in seen.selected]

    assert sorted(names(Part(1, 2)) + names(Part(2, 2))) == sorted(names(None))


@pytest.mark.parametrize("text", ["2", "0/4", "5/4", "1/0", "a/b", ""])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(pytest.UsageError, match=f"--part {text}: give one of several parts"):
        Part.parse(text)


def test_slow_cases_have_quick_ones_beside_them(request: pytest.FixtureRequest) -> None:
    assert not without_quick_case(request.config.stash[COLLECTED])


def test_names_of_cases_are_those_of_other_processes(request: pytest.FixtureRequest) -> None:
    """Parts are chosen by names, and all workers of a run have to choose the same one."""
    assert not [item.nodeid for item in request.config.stash[COLLECTED] if " at 0x" in item.nodeid]


TESTS_OF_ANOTHER_RUN = """
import pytest
from support.markers.slow import slow_if

@slow_if(lambda a, b: a != b)
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
def test_pairs(a, b): pass

@slow_if(lambda c: True)
@pytest.mark.parametrize("c", [1, 2])
def test_all(c): pass

@pytest.mark.slow
def test_one(): pass
"""


class Collects:
    """Marks and selects the cases of a run as the tests' own run does, and keeps them."""

    def __init__(self, part: Part | None = None) -> None:
        self.items: list[pytest.Item] = []
        self.selected: list[pytest.Item] = []
        self._part = part

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        mark_slow(items)
        self.items = list(items)
        if self._part is not None:
            self._part.select(config, items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.selected = list(session.items)


def test_cases_are_chosen_by_their_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "test_others.py").write_text(TESTS_OF_ANOTHER_RUN)
    (tmp_path / "test_slow.py").write_text("import pytest\n\n@pytest.mark.slow\ndef test_two(): pass\n")
    monkeypatch.chdir(tmp_path)
    seen = Collects()
    assert pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "."], [seen]) == 0
    slow = {item.name for item in seen.items if item.get_closest_marker("slow")}
    assert slow == {"test_pairs[1-2]", "test_pairs[2-1]", "test_all[1]", "test_all[2]", "test_one", "test_two"}
    assert without_quick_case(seen.items) == {"test_others.py::test_all", "test_slow.py"}
