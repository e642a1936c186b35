"""The command that places the buffers of a CSV file: its file, its output and the input that it refuses."""

from __future__ import annotations

import csv
import os
import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from support.paths import ROOT
from support.samples.messages import imported

from lightning_memo import place as command
from lightning_memo.planner.placement import Problem, mip
from lightning_memo.planner.placement.placement_core import PythonCore
from lightning_memo.planner.placement.problem import section
from lightning_memo.utils import native_build as native

HEADER = "id,lower,upper,size\n"
TABLE = HEADER + "a,0,3,4\nb,2,5,4\nc,4,7,8\n"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Writes a table to `in.csv` and places it in this process; returns exit status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def place(table=TABLE, *options, output="out.csv"):
        content = table if isinstance(table, bytes) else table.encode()
        Path("in.csv").write_bytes(content)
        status = command.main(["in.csv", str(output), *options])
        return (status, *capfd.readouterr())

    return place


def command_line(*arguments, folder, **environment):
    return subprocess.run(
        [sys.executable, "-m", "lightning_memo.place", *map(str, arguments)],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), **environment}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip


def rows_of(path):
    with Path(path).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def peak_of(rows):
    """Returns the end of the highest buffer, after checking that live buffers do not overlap."""
    boxes = [tuple(int(row[name]) for name in ("lower", "upper", "offset", "size")) for row in rows]
    for (lower, upper, offset, size), (other_lower, other_upper, other_offset, other_size) in combinations(boxes, 2):
        apart = upper <= other_lower or other_upper <= lower
        assert apart or offset + size <= other_offset or other_offset + other_size <= offset
    return max((offset + size for _, _, offset, size in boxes), default=0)


def printed(text):
    """Returns the printed result as values by name."""
    return {line[:11].strip(): line[12:].strip() for line in text.splitlines()}


def assert_refused(result, *words):
    """Expects one line on stderr, exit status 2, and no file except the input."""
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert sorted(os.listdir()) == ["in.csv"]  # noqa: PTH208


# ---- as a command


def test_the_command_places_a_file(tmp_path):
    (tmp_path / "in.csv").write_text(TABLE)
    done = command_line("in.csv", "out.csv", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert peak_of(rows_of(tmp_path / "out.csv")) == 12
    assert printed(done.stdout)["peak"].startswith("12 bytes")


def test_the_command_ends_with_1_where_the_capacity_is_passed(tmp_path):
    (tmp_path / "in.csv").write_text(TABLE)
    done = command_line("in.csv", "out.csv", "--capacity", "11", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "does not fit" in done.stdout
    assert peak_of(rows_of(tmp_path / "out.csv")) == 12


@pytest.mark.parametrize("arguments", [["in.csv"], [], ["missing.csv", "out.csv"], ["in.csv", "out.csv", "--fast"]])
def test_the_command_refuses_in_one_line(tmp_path, arguments):
    (tmp_path / "in.csv").write_text(TABLE)
    done = command_line(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


def test_the_command_imports_neither_torch_nor_lightning(tmp_path):
    (tmp_path / "in.csv").write_text(TABLE)
    done = command_line("in.csv", "out.csv", folder=tmp_path, PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0
    packages = imported(done.stderr)
    assert {"lightning_memo", "numpy"} <= packages
    assert not packages & {"torch", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"}


# ---- what it writes and prints


def test_the_output_has_the_rows_and_columns_of_the_input_and_offsets(run):
    status, _, err = run('id,lower,upper,size,name\nz,2,5,4,first\na,0,3,4,"x,y"\n')
    assert (status, err) == (0, "")
    assert Path("out.csv").read_text().splitlines()[0] == "id,lower,upper,size,name,offset"
    rows = rows_of("out.csv")
    assert [row["id"] for row in rows] == ["z", "a"]
    assert [row["name"] for row in rows] == ["first", "x,y"]
    assert peak_of(rows) == 8
    assert sorted(os.listdir()) == ["in.csv", "out.csv"]  # noqa: PTH208


def test_columns_may_come_in_any_order(run):
    assert run("size, upper ,id,lower\n4,3,a,0\n4,5,b,2\n")[0] == 0
    assert Path("out.csv").read_text().splitlines()[0] == "size,upper,id,lower,offset"
    assert peak_of(rows_of("out.csv")) == 8


def test_an_offset_that_was_there_is_replaced(run):
    assert run("id,offset,lower,upper,size\na,77,0,3,4\nb,77,2,5,4\n")[0] == 0
    assert Path("out.csv").read_text().splitlines()[0] == "id,lower,upper,size,offset"
    assert sorted(row["offset"] for row in rows_of("out.csv")) == ["0", "4"]


def test_a_placed_file_is_placed_again_to_the_same(run):
    run()
    first = Path("out.csv").read_text()
    assert run(first)[0] == 0
    assert Path("out.csv").read_text() == first


def test_the_output_may_be_the_input(run):
    assert run(output="in.csv")[0] == 0
    assert peak_of(rows_of("in.csv")) == 12
    assert os.listdir() == ["in.csv"]  # noqa: PTH208


def test_an_older_output_is_replaced(run):
    Path("out.csv").write_text("old")
    assert run()[0] == 0
    assert len(rows_of("out.csv")) == 3


@pytest.mark.parametrize(
    "table",
    [
        TABLE.replace("\n", "\r\n"), b"\xef\xbb\xbf" + TABLE.encode(), TABLE.rstrip("\n"), TABLE + "\n\n",
        TABLE.replace(",", ", "), TABLE.replace("4", "+4"), TABLE.replace("a,", '"a",'),
    ],
    ids=["windows", "byte order mark", "no end", "empty lines", "spaces", "signs", "quotes"],
)  # fmt: skip
def test_ways_to_write_a_table(run, table):
    status, _, err = run(table)
    assert (status, err) == (0, "")
    assert peak_of(rows_of("out.csv")) == 12


def test_a_table_without_buffers_has_an_empty_placement(run):
    status, out, err = run(HEADER)
    assert (status, err) == (0, "")
    assert printed(out)["peak"].startswith("0 bytes")
    assert printed(out)["optimal"] == "yes"
    assert Path("out.csv").read_text() == "id,lower,upper,size,offset\n"


def test_what_is_printed(run):
    _, out, _ = run(TABLE, "--capacity", "1KiB")
    lines = printed(out)
    assert list(lines) == ["peak", "lower bound", "optimal", "found by", "seconds", "capacity"]
    assert lines["peak"] == "12 bytes (12 B)"
    assert lines["lower bound"] == "12 bytes"
    assert lines["optimal"] == "yes"
    assert lines["capacity"] == "1024 bytes: fits"
    assert float(lines["seconds"]) >= 0


@pytest.mark.parametrize(("capacity", "status"), [("12", 0), ("12B", 0), ("11", 1), ("1GiB", 0)])
def test_the_status_says_whether_the_placement_fits(run, capacity, status):
    assert run(TABLE, "--capacity", capacity)[0] == status
    assert peak_of(rows_of("out.csv")) == 12


def test_offsets_are_aligned(run):
    assert run(TABLE, "--alignment", "512B")[0] == 0
    offsets = [int(row["offset"]) for row in rows_of("out.csv")]
    assert {offset % 512 for offset in offsets} == {0}
    assert max(offsets) == 512


def test_large_numbers_are_kept(run):
    last = 2**63 - 1
    assert run(f"{HEADER}a,{-(2**63)},{last},{2**60}\nb,0,{last},{2**60}\n")[0] == 0
    assert peak_of(rows_of("out.csv")) == 2**61


def test_the_command_says_that_there_is_no_compiler(tmp_path):
    (tmp_path / "in.csv").write_text(TABLE)
    done = command_line("in.csv", "out.csv", folder=tmp_path, CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 0
    assert "The C++ search is not available" in done.stderr
    assert peak_of(rows_of(tmp_path / "out.csv")) == 12


# ---- bad input

BAD_TABLES = {
    "nothing": (b"", "column id"),
    "no header": (b"a,0,3,4\n", "column id"),
    "binary": (bytes(range(256)) * 8, "not text"),
    "zeros": (bytes(100), "in.csv"),
    "missing column": ("id,lower,upper\na,0,1\n", "column size missing"),
    "missing columns": ("id,size\na,0\n", "column lower and upper missing"),
    "column twice": ("id,lower,upper,size,size\na,0,1,2,3\n", "column size is there 2 times"),
    "other case": (TABLE.replace("id", "ID"), "column id missing"),
    "negative size": (HEADER + "a,0,1,4\nb,0,1,-1\n", "line 3: size=-1"),
    "dies at birth": (HEADER + "a,3,3,1\n", "line 2: upper=3"),
    "dies before birth": (HEADER + "a,3,2,1\n", "line 2: upper=2"),
    "size past 64 bits": (f"{HEADER}a,0,1,{2**63}\n", "line 2: size=9223372036854775808 does not fit"),
    "lower past 64 bits": (f"{HEADER}a,{-2**63 - 1},1,1\n", "line 2: lower=-9223372036854775809 does not fit"),
    "upper past 64 bits": (f"{HEADER}a,0,{2**63},1\n", "line 2: upper=9223372036854775808 does not fit"),
    "very long number": (f"{HEADER}a,0,1,{'9' * 10**5}\n", "size='99999"),
    "sum past 64 bits": (HEADER + "".join(f"{k},{k},{k + 1},{2**61}\n" for k in range(9)), "sum to more than"),
    "one past the limit": (f"{HEADER}a,0,1,{2**61}\nb,1,2,1\n", "sum to more than"),
    "fraction": (HEADER + "a,0,1,1.5\n", "line 2: size='1.5' is not an integer"),
    "exponent": (HEADER + "a,0,1,1e3\n", "size='1e3'"),
    "underscore": (HEADER + "a,0,1,1_000\n", "size='1_000'"),
    "other digits": (HEADER + "a,0,1,\u0663\n", "is not an integer"),
    "text": (HEADER + "a,now,1,1\n", "lower='now'"),
    "nan": (HEADER + "a,0,nan,1\n", "upper='nan'"),
    "empty cell": (HEADER + "a,0,,1\n", "upper=''"),
    "short row": (HEADER + "a,0,1\n", "line 2: 3 values for 4 columns"),
    "long row": (HEADER + "a,0,1,1,1\n", "line 2: 5 values for 4 columns"),
    "same id": (HEADER + "a,0,1,1\nb,0,1,1\na,2,3,1\n", "line 4: id 'a' is already in line 2"),
    "open quote": (HEADER + 'a,0,1,"1\n', "in.csv"),
    "odd quote": (HEADER + 'a,0,1,"1"1\n', "in.csv"),
    "line break in a cell": (HEADER + 'a,0,1,"1\n2"\n', "is not an integer"),
    "very long cell": (HEADER + "a" * 200_000 + ",0,1,1\n", "in.csv"),
    "line break in the header": ('"id\n",lower,upper,"si\nze"\n', "column size missing"),
    "lone carriage return": (HEADER + "a\rb,0,1,1\n", "in.csv"),
    "separators": (TABLE.replace(",", ";"), "column id"),
    "16-bit text": (TABLE.encode("utf-16"), "not text"),
}  # fmt: skip


@pytest.mark.parametrize(("table", "words"), BAD_TABLES.values(), ids=BAD_TABLES)
def test_a_bad_table_is_refused(run, table, words):
    assert_refused(run(table), "in.csv: ", words)


BAD_OPTIONS = {
    "capacity zero": (["--capacity", "0"], "--capacity"),
    "capacity negative": (["--capacity=-5"], "--capacity"),
    "capacity text": (["--capacity", "lots"], "--capacity"),
    "capacity empty": (["--capacity", ""], "--capacity"),
    "capacity missing": (["--capacity"], "--capacity"),
    "time zero": (["--time-limit", "0"], "--time-limit"),
    "time negative": (["--time-limit=-1"], "--time-limit"),
    "time nan": (["--time-limit", "nan"], "--time-limit"),
    "time infinite": (["--time-limit", "inf"], "--time-limit"),
    "time text": (["--time-limit", "soon"], "--time-limit"),
    "alignment zero": (["--alignment", "0"], "--alignment"),
    "alignment text": (["--alignment", "x"], "--alignment"),
    "alignment too large": (["--alignment", "4096PiB"], f"{2**61}"),
    "alignment past 64 bits": (["--alignment", "99999PiB"], "alignment"),
    "alignment far past 64 bits": (["--alignment", "999999999999PiB"], "alignment"),
    "unknown": (["--fast"], "--fast"),
    "too many": (["another.csv"], "another.csv"),
}


@pytest.mark.parametrize(("options", "words"), BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_a_bad_option_is_refused(run, options, words):
    assert_refused(run(TABLE, *options), words)


def test_sizes_that_overflow_by_their_alignment_are_refused(run):
    assert_refused(run(f"{HEADER}a,0,1,{2**63 - 1}\n", "--alignment", "4096"), "sum to more than")


def test_a_capacity_above_64_bits_is_enough(run):
    assert run(TABLE, "--capacity", "999999999999PiB")[0] == 0


def test_a_missing_output_folder_is_refused(run):
    assert_refused(run(output="folder/out.csv"), "folder does not exist")


def test_a_file_for_the_output_folder_is_refused(run):
    assert_refused(run(output="in.csv/out.csv"), "in.csv")


def test_a_folder_for_the_output_is_refused(run, tmp_path):
    outside = tmp_path.parent / f"{tmp_path.name}-folder"
    outside.mkdir()
    assert_refused(run(output=outside), "is a folder")
    assert list(outside.iterdir()) == []


def test_an_output_that_cannot_be_written_is_refused_before_the_work(run, monkeypatch):
    def touch(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", touch)
    monkeypatch.setattr(command, "place", lambda *_, **__: pytest.fail("placed"))
    assert_refused(run(), "out.csv cannot be written (Permission denied): give a folder that can be written to")


def test_a_full_disk_is_reported(run, monkeypatch):
    def write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(command.ProblemTable, "write", write)
    assert_refused(run(), "No space left on device")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the superuser may read every file")
def test_an_input_that_cannot_be_read_is_refused(run, tmp_path):
    run()
    Path("out.csv").unlink()
    Path("in.csv").chmod(0)
    assert command.main(["in.csv", "out.csv"]) == 2


def test_a_folder_for_the_input_is_refused(run, tmp_path, capfd):
    run()
    Path("out.csv").unlink()
    assert_refused((command.main([".", "out.csv"]), *capfd.readouterr()))


def test_a_missing_input_is_refused(run, capfd):
    run()
    Path("out.csv").unlink()
    assert_refused((command.main(["missing.csv", "out.csv"]), *capfd.readouterr()), "missing.csv")


def test_a_refusal_leaves_an_older_output_alone(run):
    Path("out.csv").write_text("old")
    assert run(HEADER + "a,0,1,-1\n")[0] == 2
    assert Path("out.csv").read_text() == "old"


def test_an_interrupt_leaves_no_file(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "place", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert os.listdir() == ["in.csv"]  # noqa: PTH208


def test_an_interrupt_leaves_an_older_output_alone(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    Path("out.csv").write_text("old")
    monkeypatch.setattr(command.ProblemTable, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run()
    assert Path("out.csv").read_text() == "old"
    assert sorted(os.listdir()) == ["in.csv", "out.csv"]  # noqa: PTH208


# ---- problems with a known optimum


def cut_rectangle(seed, buffers, capacity=1000, times=60):
    """Rows of a problem with the optimum `capacity`, made by cutting the rectangle capacity x time into buffers."""
    draw = random.Random(seed)
    pieces = [(0, times, 0, capacity)]
    while len(pieces) < buffers:
        chances = [(end - start) * (high - low) * draw.random() for start, end, low, high in pieces]
        start, end, low, high = pieces.pop(chances.index(max(chances)))
        if end - start > 1 and (high - low == 1 or draw.random() < 0.5):
            cut = draw.randint(start + 1, end - 1)
            pieces += [(start, cut, low, high), (cut, end, low, high)]
        elif high - low > 1:
            cut = draw.randint(low + 1, high - 1)
            pieces += [(start, end, low, cut), (start, end, cut, high)]
        else:
            pieces.append((start, end, low, high))
    draw.shuffle(pieces)
    return [(start, end, high - low) for start, end, low, high in pieces]


def best_of_one_pass(rows):
    lower, upper, size = np.array(rows, np.int64).T.copy()
    problem = section(Problem(lower=lower, upper=upper, size=size))
    placements = mip.placements(problem, PythonCore(problem))
    return min(int((offset + problem.size).max()) for _, offset in placements) * problem.unit_bytes


@pytest.mark.parametrize(
    ("seed", "buffers"), [(1, 60), (2, 60), (11, 60), (2, 80), (5, 80), (11, 80), (6, 100), (3, 100)]
)
def test_problems_that_no_single_pass_solves_are_solved(run, seed, buffers):
    try:
        native.find_compiler()
    except native.BuildError as error:
        pytest.skip(str(error))
    rows = cut_rectangle(seed, buffers)
    assert len(rows) == buffers
    assert best_of_one_pass(rows) > 1000
    table = HEADER + "".join(f"{k},{lower},{upper},{size}\n" for k, (lower, upper, size) in enumerate(rows))
    status, out, _ = run(table, "--capacity", "1000")
    assert status == 0
    assert printed(out)["lower bound"] == "1000 bytes"
    assert printed(out)["optimal"] == "yes"
    assert peak_of(rows_of("out.csv")) == 1000


def test_a_device_is_never_replaced(tmp_path, capsys):
    (tmp_path / "in.csv").write_text("id,lower,upper,size\n0,0,1,8\n")
    os.mkfifo(tmp_path / "pipe")
    assert command.main([str(tmp_path / "in.csv"), str(tmp_path / "pipe")]) == 2
    assert "not a regular file" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    (tmp_path / "in.csv").write_text("id,lower,upper,size\n0,0,1,8\n")
    (tmp_path / "target.csv").write_text("old")
    (tmp_path / "link.csv").symlink_to(tmp_path / "target.csv")
    assert command.main([str(tmp_path / "in.csv"), str(tmp_path / "link.csv")]) == 0
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "target.csv").read_text().endswith("0,0,1,8,0\n")
