"""The benchmark of placements, on tiny problems and with a stand-in for MiniMalloc."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import warm
from support.paths import ROOT

HEADER = "id,lower,upper,size\n"
PROBLEMS = {
    "tight.12.csv": HEADER + "a,0,3,4\nb,2,5,4\nc,4,7,8\n",
    "narrow.7.csv": HEADER + "a,0,3,4\nb,2,5,4\n",
    "free.csv": HEADER + "b,2,5,4\na,0,3,4\n",
    "empty.csv": HEADER,
    "wrong.csv": HEADER + "a,3,0,4\n",
}

STACKS = """#!{python}
# Stands in for MiniMalloc: lays all buffers one on top of the other.
import csv, sys

options = dict(argument.lstrip("-").split("=", 1) for argument in sys.argv[1:])
assert set(options) == {{"capacity", "input", "output", "timeout"}} and options["timeout"].endswith("s")
top = 0
with open(options["input"]) as file, open(options["output"], "w") as output:
    output.write("id,lower,upper,size,offset\\n")
    for row in csv.DictReader(file):
        output.write(f"{{row['id']}},{{row['lower']}},{{row['upper']}},{{row['size']}},{{top}}\\n")
        top += int(row["size"])
sys.exit(top > int(options["capacity"]))
"""


def program(path, content):
    path.write_text(content.format(python=sys.executable))
    path.chmod(0o755)
    return path


def run(*arguments):
    return subprocess.run(
        [warm.tools() / "python", ROOT / "benchmarks" / "placement.py", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run over all problems: what it printed, and its report."""
    folder = tmp_path_factory.mktemp("problems")
    for name, content in PROBLEMS.items():
        (folder / name).write_text(content)
    results = tmp_path_factory.mktemp("results")
    fake = program(results.parent / f"{results.name}-minimalloc", STACKS)
    process = run(folder, "--minimalloc", fake, "--quick", "--output", results, "--name", "tiny")
    assert process.returncode == 0, process.stderr
    assert [path.name for path in results.iterdir()] == ["tiny.json"]
    return process.stdout, json.loads((results / "tiny.json").read_text())


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module("placement")
    sys.modules.pop("placement", None)


def row_of(finished, name):
    return next(row for row in finished[1]["results"] if row["problem"] == name)


@pytest.mark.slow
def test_the_report_says_what_was_measured_and_on_what(finished):
    report = finished[1]
    assert "--quick" in report["command"]
    assert set(report["versions"]) == {"python", "lightning_memo", "numpy", "highspy"}
    assert report["device"] == report["cpu"]["name"]
    assert report["time_limit"] == 1.0
    assert report["date"]
    assert [row["problem"] for row in report["results"]] == ["empty", "free", "narrow", "tight", "wrong"]


def test_place_is_measured(finished):
    row = row_of(finished, "tight")
    assert (row["buffers"], row["capacity"], row["largest_load"]) == (3, 12, 12)
    assert (row["place"]["peak"], row["place"]["lower_bound"]) == (12, 12)
    assert row["place"]["optimal"] is row["place"]["fits"] is True
    assert row["place"]["seconds"] > 0


def test_a_capacity_that_is_passed_is_said(finished):
    place = row_of(finished, "narrow")["place"]
    assert (place["peak"], place["fits"]) == (8, False)
    line = next(line for line in finished[0].splitlines() if line.split()[:1] == ["narrow"])
    assert line.split()[6] == "no"


def test_the_best_one_pass_placement_is_named(finished):
    one_pass = row_of(finished, "tight")["one_pass"]
    assert one_pass["peak"] == min(one_pass["peaks"].values()) == one_pass["peaks"][one_pass["best"]] == 12
    assert len(one_pass["peaks"]) == 24


def test_minimalloc_is_asked_for_the_capacity_or_for_the_peak_of_place(finished):
    free, narrow = row_of(finished, "free")["minimalloc"], row_of(finished, "narrow")["minimalloc"]
    assert (free["status"], free["capacity"], free["peak"]) == ("ok", 8, 8)
    assert (narrow["status"], narrow["capacity"], narrow["peak"]) == ("no placement, exit status 1", 7, None)
    assert row_of(finished, "tight")["minimalloc"]["peak"] is None
    assert "tight: MiniMalloc: no placement, exit status 1" in finished[0]


def test_a_problem_without_buffers_is_a_row(finished):
    row = row_of(finished, "empty")
    assert row["place"]["peak"] == 0
    assert row["one_pass"] is None


def test_a_file_that_is_no_problem_is_a_line_and_the_others_go_on(finished):
    assert "wrong.csv: line 2" in row_of(finished, "wrong")["status"]
    assert "wrong: " in finished[0]


MISTAKES = {
    "no output": ("import sys", "its output can't be read"),
    "other rows": ("open(OUT, 'w').write('id,offset\\nx,0\\n')", "its output can't be read"),
    "overlap": ("open(OUT, 'w').write('id,offset\\na,0\\nb,3\\n')", "its placement is wrong: two buffers"),
    "too high": ("open(OUT, 'w').write('id,offset\\na,0\\nb,5\\n')", "its placement is wrong: a buffer ends above the"),
    "no number": ("open(OUT, 'w').write('id,offset\\na,0\\nb,x\\n')", "its output can't be read"),
    "message": ("import sys; sys.exit('one\\nno room')", "no placement, exit status 1: no room"),
    "too slow": ("import time; time.sleep(60)", "stopped, it went on beyond its 0.1 s"),
}


@pytest.mark.parametrize(("body", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_minimalloc_that_fails_is_a_clear_line(benchmark, monkeypatch, tmp_path, body, message):
    monkeypatch.setattr(benchmark, "_MINIMALLOC_GRACE_SECONDS", 1.0)
    (tmp_path / "two.csv").write_text(PROBLEMS["free.csv"])
    text = f"#!{{python}}\nimport sys\nOUT = sys.argv[3].partition('=')[2]\n{body}\n"
    fake = program(tmp_path / "minimalloc", text)
    read = benchmark.read_problem(tmp_path / "two.csv")
    result = benchmark.minimalloc(fake, tmp_path / "two.csv", read, 8, 0.1)
    assert message in result.status
    assert "\n" not in result.status
    assert result.peak is None


def test_a_minimalloc_that_cannot_be_run_is_a_clear_line(benchmark, tmp_path):
    (tmp_path / "two.csv").write_text(PROBLEMS["free.csv"])
    (tmp_path / "minimalloc").write_text("no program")
    read = benchmark.read_problem(tmp_path / "two.csv")
    result = benchmark.minimalloc(tmp_path / "minimalloc", tmp_path / "two.csv", read, 8, 0.1)
    assert result.status.startswith("failed: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/folder",), "no CSV files"),
        (("problems", "--minimalloc", "missing"), "--minimalloc missing: no such file"),
        (("problems", "--time-limit", "0"), "0 must be above 0"),
        (("problems", "--time-limit", "soon"), "invalid"),
        ((), "folder"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(benchmark, monkeypatch, tmp_path, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("problems").mkdir()
    Path("problems", "free.csv").write_text(PROBLEMS["free.csv"])
    monkeypatch.setattr(sys, "argv", ["placement.py", *arguments])
    with pytest.raises(SystemExit) as end:
        benchmark.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
