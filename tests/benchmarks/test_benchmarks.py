import importlib
import json
import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from support import warm
from support.paths import ROOT

SIZES = ("--layers", "4", "--hidden", "32", "--heads", "4", "--kv-heads", "2", "--seq-len", "64", "--vocab", "64")
METHODS = ("plain", "checkpointing", "save_on_cpu", "alpha=0", "alpha=1/2", "alpha=1/2:16", "alpha=1")
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run over all kinds of methods: what it printed, and the folder with what it wrote."""
    folder = tmp_path_factory.mktemp("results")
    options = (*SIZES, "--repeats", "3", "--output", str(folder), "--name", "tiny", "--methods", *METHODS)
    process = subprocess.run(
        [warm.tools() / "python", ROOT / "benchmarks" / "engine.py", *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return process.stdout, folder


@pytest.fixture(scope="module")
def report(finished):
    return json.loads((finished[1] / "tiny.json").read_text())


@pytest.fixture
def load(monkeypatch):
    """Imports the benchmark's own modules, which lie beside its script."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    yield importlib.import_module
    for name in ("engine", "measure", "methods", "output"):
        sys.modules.pop(name, None)


def row_of(report, name):
    return next(row for row in report["results"] if row["method"]["name"] == name)


@pytest.mark.slow
def test_the_report_says_what_was_measured_and_on_what(report):
    assert report["model"] == {
        "layers": 4,
        "hidden": 32,
        "ffn": 86,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 64,
        "batch": 1,
        "seq_len": 64,
        "dtype": "float32",
    }
    assert "--repeats 3" in report["command"]
    assert set(report["versions"]) == {"python", "torch", "transformers", "lightning_memo"}
    assert torch.__version__.startswith(report["versions"]["torch"])  # the wheels of CUDA builds leave "+cu130" out
    assert report["device"] == report["cpu"]["name"]
    assert report["cpu"]["cores"] == os.cpu_count()
    assert report["threads"] == 1
    assert report["date"]


@pytest.mark.slow
def test_every_method_has_all_samples(report):
    assert [row["method"]["name"] for row in report["results"]] == list(METHODS)
    for row in report["results"]:
        assert row["status"] == "ok"
        assert len(row["seconds"]) == len(row["thread_seconds"]) == 3
        assert min(row["seconds"]) <= row["median_seconds"] <= max(row["seconds"])
        assert row["ratio"]["min"] <= row["ratio"]["median"] <= row["ratio"]["max"]


@pytest.mark.slow
def test_gradients_are_those_of_plain_training(report):
    assert row_of(report, "plain")["gradient_error"] == 0
    assert all(row["gradient_error"] < 1e-5 for row in report["results"])


def test_bytes_grow_with_alpha(report):
    sizes = [row_of(report, f"alpha={alpha}")["offloaded_bytes"] for alpha in ("0", "1/2", "1")]
    assert 0 < sizes[0] < sizes[1] < sizes[2]
    for row in report["results"]:
        assert row["overflow_bytes"] == 0
        assert (row["host_bytes"] > 0) == (row["method"]["name"] not in ("plain", "checkpointing"))


def test_every_other_method_takes_less_device_memory_than_plain_training(report):
    assert all(row["peak_ratio"] < 1 for row in report["results"][1:])


def test_the_table_shows_every_method_on_a_line(finished):
    lines = finished[0].splitlines()
    for name in METHODS:
        assert any(line.split()[:1] == [name] for line in lines)


def test_the_files_are_a_report_and_a_picture(finished):
    printed, folder = finished
    assert sorted(path.name for path in folder.iterdir()) == ["tiny.json", "tiny.png"]
    assert (folder / "tiny.png").read_bytes().startswith(PNG_SIGNATURE)
    assert str(folder / "tiny.json") in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--methods", "alpha=2"), "'alpha=2' is no method"),
        (("--methods", "alpha=1/0"), "'alpha=1/0' is no method"),
        (("--methods", "alpha=1/2:0"), "'alpha=1/2:0' is no method"),
        (("--methods", "fast"), "'fast' is no method"),
        (("--hidden", "30"), "--hidden must be a multiple"),
        (("--kv-heads", "3"), "--heads one of --kv-heads"),
        (("--repeats", "0"), "0 must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(load, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(sys, "argv", ["engine.py", *arguments])
    with pytest.raises(SystemExit) as end:
        load("engine").main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


class TooSmall:
    """A workload on a device with room for one method, and for none at all later."""

    device = torch.device("cpu")

    def __init__(self, methods, steps):
        self.model = torch.nn.Linear(2, 2)
        self.fits, self.steps = methods, steps

    @contextmanager
    def using(self, method, metered=False):
        if method.name not in self.fits:
            raise MemoryError("no room\nfor it")
        yield lambda: importlib.import_module("methods").Usage()

    def step(self):
        self.steps -= 1
        if self.steps < 0:
            raise torch.OutOfMemoryError("out of memory")
        self.model(torch.ones(1, 2)).sum().backward()

    def synchronize(self):
        pass

    def free_gradients(self):
        self.model.zero_grad()


def bench_of(load, workload, names):
    bench = load("measure").Bench(workload, [load("methods").Method.parse(name) for name in names], warmup=0)
    for turn in bench.turns(repeats=2):
        turn.take()
    return bench


def test_a_method_that_fails_is_a_row_and_the_others_go_on(load, tmp_path):
    bench = bench_of(load, TooSmall({"plain", "checkpointing"}, 99), ("plain", "alpha=1", "checkpointing"))
    rows = [result.as_json(bench.plain) for result in bench.results]
    assert [row["status"] for row in rows] == ["ok", "MemoryError: no room", "ok"]
    assert rows[1]["ratio"] is rows[1]["peak_device_bytes"] is None
    assert len(rows[2]["seconds"]) == 2
    table = load("output").table(rows, "title")
    assert "alpha=1 stopped: MemoryError: no room" in table.caption.plain
    load("output").draw(rows, "title", tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(PNG_SIGNATURE)


def test_without_plain_training_the_others_are_still_measured(load, tmp_path):
    bench = bench_of(load, TooSmall({"checkpointing"}, 99), ("checkpointing",))
    plain, row = [result.as_json(bench.plain) for result in bench.results]
    assert plain["status"] == "MemoryError: no room"
    assert row["median_seconds"] > 0
    assert row["ratio"] is row["peak_ratio"] is row["gradient_error"] is None
    load("output").draw([plain, row], "title", tmp_path / "none.png")


def test_a_method_that_fails_late_keeps_its_samples(load):
    bench = bench_of(load, TooSmall({"plain"}, 2), ())
    assert bench.plain.status == "OutOfMemoryError: out of memory"
    assert len(bench.plain.seconds) == 1


def test_nothing_measured_is_drawn_too(load, tmp_path):
    bench = bench_of(load, TooSmall(set(), 0), ("plain",))
    load("output").draw([bench.plain.as_json(bench.plain)], "title", tmp_path / "empty.png")
    assert (tmp_path / "empty.png").exists()
