import contextlib
import csv
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image
from rich.console import Console
from support.commands import MODULE, SWEEP, TINY_RUN, WITHOUT_REPORT, environment, python
from support.commands import run as run_command

from lightning_memo.cli.run_folder import RunSummary, differing_settings
from lightning_memo.cli.sweep import draw_sweep, load_runs, sweep_results_table


def run(seq_len, *more, **changes):
    results = {
        "seq_len": seq_len,
        "batch_size": 1,
        "alpha": 0.25,
        "step_seconds": seq_len / 1000,
        "tokens_per_second": 1000.0,
        "step_memory_bytes": seq_len * 2**20,
        "host_bytes": 3 * 2**20,
        "train_loss": 2.5,
        "val_loss": 2.625,
        "unigram_entropy": 3.0,
    }
    return RunSummary(overrides=[f"data.seq_len={seq_len}", "name=x", *more], **{"status": "ok", **results, **changes})


FAILED = RunSummary(overrides=["data.seq_len=9", "name=x"], status="failed", message="data.seq_len=9: too long")


def text(table, width=100):
    console = Console(width=width)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_only_what_differs_was_swept():
    assert differing_settings([run(1), run(2), FAILED]) == ["data.seq_len"]
    assert differing_settings([run(1), run(1, "trainer.max_steps=3")]) == ["trainer.max_steps"]
    assert differing_settings([run(1)]) == []


def test_table_has_all_results_in_a_row():
    lines = text(sweep_results_table([run(512), FAILED]), width=80).splitlines()
    row = next(line for line in lines if "512" in line and "MiB" in line)
    assert row.split() == ["512", "0.512", "1,000", "512.0", "MiB", "3.0", "MiB", "0.25", "2.500", "2.625"]
    assert any("data.seq_len=9 failed: data.seq_len=9: too long" in line for line in lines)


def test_table_says_why_results_are_missing():
    shown = text(sweep_results_table([run(512, step_seconds=None, val_loss=None), run(256)]), width=120)
    assert "step (s) -: the first 3 steps" in shown
    assert "val loss -: no validation until trainer.max_steps" in shown
    assert " -: " not in text(sweep_results_table([run(512)]))


def test_summary_comes_back_as_it_was_written(tmp_path):
    for number, seq_len in ((10, 1), (9, 2)):
        run(seq_len).save(tmp_path / str(number))
    assert load_runs(tmp_path) == [run(2), run(1)]


def named(strategy):
    return run(16, f"strategy={strategy}")


SWEPT = {
    "failed": [run(512), FAILED, run(1024, alpha=None)],
    "single": [run(512)],
    "two settings": [run(n, f"strategy={name}") for n in (64, 256, 128) for name in ("memo", "full_recompute")],
    "names": [named("memo"), named("full_recompute"), replace(named("plain"), status="failed")],
}


@pytest.mark.slow
@pytest.mark.parametrize("runs", SWEPT.values(), ids=SWEPT)
def test_picture(tmp_path, runs):
    draw_sweep(runs, tmp_path / "sweep.png")
    with Image.open(tmp_path / "sweep.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("L").getcolors()) > 10
    assert len(list(tmp_path.iterdir())) == 1


def test_a_picture_has_a_line_for_each_strategy_over_the_lengths(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: (figures.append(figure), path.touch()))
    draw_sweep(SWEPT["two settings"], tmp_path / "sweep.png")
    draw_sweep(SWEPT["names"], tmp_path / "sweep.png")
    lines, bars = (figure.axes[0] for figure in figures)
    assert {line.get_label(): list(line.get_ydata()) for line in lines.lines} == {
        "memo": [0.064, 0.128, 0.256],
        "full_recompute": [0.064, 0.128, 0.256],
    }
    assert [label.get_text() for label in lines.get_xticklabels()] == ["64", "128", "256"]
    assert not bars.lines and len(bars.patches) == 3


@pytest.mark.slow
def test_sweep_reports_all_jobs_and_failures(train, tmp_path):
    status, out, err = train("-m", "strategy=plain", "data.seq_len=16,90000,32")
    assert status == 1, err
    assert out.count("Sweep\n") + out.count("Sweep ") == 1
    table = out[out.rindex("Sweep") :]
    assert "data.seq_len=90000 failed: data.seq_len=90000" in table
    folder = tmp_path / "outputs/train/sweeps/last"
    assert [summary.status for summary in load_runs(folder)] == ["ok", "failed", "ok"]
    assert [summary.seq_len for summary in load_runs(folder)] == [16, 90000, 32]
    assert (folder / "sweep.png").stat().st_size > 10_000
    assert "Traceback" not in err


# ---- sweeps that continue


def rows(job, lost=None):
    """The logged values of a job by step, without times, and without a step that may be lost."""
    with (job / "csv" / "metrics.csv").open() as file:
        found = list(csv.DictReader(file))
    names = ("train_loss", "val_loss", "lr", "tokens", "unigram_entropy")
    found = [row for row in found if int(row["step"]) != lost]
    return sorted((int(row["step"]), name, row[name]) for row in found for name in names if row.get(name))


def last_step(checkpoint):
    """The last step of a checkpoint, whose row SIGKILL loses if Lightning's logger has not written it yet."""
    return int(checkpoint.stem.removeprefix("step-")) - 1


SHORT = (
    "callbacks.checkpoint.every_n_train_steps=2",
    "trainer.max_steps=6",
    "+callbacks.pause._target_=support.samples.callbacks.Pause",
)
"""Settings of jobs that have a checkpoint when they pause, see `interrupted`."""


def interrupted(folder, number, *settings, job=1, cold=False):
    """Starts a sweep and kills it once a job pauses, which has a checkpoint then; returns its exit status."""
    command = ["python", *MODULE, "-m", *TINY_RUN, *WITHOUT_REPORT, *settings]
    environ = {**environment(cold), "PAUSED_JOB": str(job), "PYTHONFAULTHANDLER": "1"}
    with (folder / "killed.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environ, stdout=log, stderr=log, executable=python(environ))
        deadline = time.monotonic() + 240
        while not (folder / SWEEP / str(job) / "paused").exists() and time.monotonic() < deadline:
            assert process.poll() is None, (folder / "killed.log").read_text()
            time.sleep(0.01)
        status = end(process, number)
    assert status is not None, (folder / "killed.log").read_text()
    return status


def end(process, number):
    """Sends a signal, and returns the exit status; None if the process goes on, and has to print its stacks.

    An interrupt is sent twice, because Python ignores an exception inside some functions of C extensions.
    """
    for _ in range(2 if number == signal.SIGINT else 1):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=60)
    process.send_signal(signal.SIGABRT)
    process.wait(timeout=60)
    return None


@pytest.fixture(scope="module")
def root_of_whole(tmp_path_factory):
    """Folder of the uninterrupted sweep, which is the same for each signal: the first test runs it."""
    return tmp_path_factory.mktemp("whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_interrupted_sweep_goes_on(train, tmp_path, root_of_whole, number):
    settings = ["strategy=plain", "optim.lr=0.001,0.002,0.003", *SHORT]
    assert interrupted(tmp_path, number, *settings) != 0
    assert sorted(path.name for path in (tmp_path / SWEEP).iterdir() if path.is_dir()) == ["0", "1"]
    done = (tmp_path / SWEEP / "0" / "csv" / "metrics.csv").stat()
    assert not (tmp_path / SWEEP / "1" / "summary.json").exists()
    checkpoint = max((tmp_path / SWEEP / "1" / "checkpoints").glob("step-*.ckpt"), key=last_step)

    status, out, err = train("-m", *settings, "sweep=last")
    assert status == 0, err
    assert out.count("unigram entropy of the text") == 2, "two jobs were left"
    assert (tmp_path / SWEEP / "0" / "csv" / "metrics.csv").stat() == done
    assert f"resuming from {checkpoint.resolve()}" in (tmp_path / SWEEP / "1" / "train.log").read_text()
    if number is not signal.SIGKILL:
        name = (tmp_path / SWEEP).resolve().name
        assert f"run the same command with sweep={name}" in (tmp_path / "killed.log").read_text()

    whole_sweep = root_of_whole / "whole/sweeps/last"
    if not whole_sweep.exists():
        assert train("-m", *settings, "name=whole", f"paths.root={root_of_whole}")[0] == 0
    runs, whole = load_runs(tmp_path / SWEEP), load_runs(whole_sweep)
    assert [run.train_loss for run in runs] == [run.train_loss for run in whole]
    assert [run.val_loss for run in runs] == [run.val_loss for run in whole]
    for job in "012":
        lost = last_step(checkpoint) if (job, number) == ("1", signal.SIGKILL) else None
        assert rows(tmp_path / SWEEP / job, lost) == rows(whole_sweep / job, lost)
    table = out[out.rindex("Sweep") :]
    assert [line.split()[0] for line in table.splitlines() if "MiB" in line or "KiB" in line] == [
        "0.001",
        "0.002",
        "0.003",
    ]
    assert (tmp_path / SWEEP / "sweep.png").is_file()


@pytest.mark.slow
def test_new_values_are_new_jobs_and_failed_ones_are_tried_again(train, tmp_path):
    text = tmp_path / "text"
    sweep = ["-m", "strategy=plain", f"data.path={text}", "sweep=mine"]
    assert train(*sweep, "data.seq_len=16,24")[0] == 1
    assert [run.status for run in load_runs(tmp_path / SWEEP)] == ["failed", "failed"]
    text.mkdir()
    for name in "ab":
        (text / f"{name}.py").write_text("x = 1\n" * 1000)
    status, _, err = train(*sweep, "data.seq_len=16,24,32")
    assert status == 0, err
    assert [(run.status, run.seq_len) for run in load_runs(tmp_path / SWEEP)] == [("ok", 16), ("ok", 24), ("ok", 32)]
    assert train(*sweep, "data.seq_len=16,24,32", "trainer.max_steps=5")[1].count("unigram entropy of the text") == 0
    assert (tmp_path / SWEEP).resolve() == tmp_path / "outputs/train/sweeps/mine"


@pytest.fixture(scope="module")
def failed_sweep(tmp_path_factory):
    """Folder with a sweep of two jobs that failed at once: the first test runs it."""
    return tmp_path_factory.mktemp("failed")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-m", "data.seq_len=16,48", "sweep=last"],
            "job 1 was data.seq_len=24, but would now be data.seq_len=48; repeat the",
        ),
        (["-m", "data.seq_len=24,16", "sweep=last"], "job 0 was data.seq_len=16, but would now be data.seq_len=24"),
        (["-m", "data.seq_len=16", "sweep=last"], "job 1 was data.seq_len=24, but would now be missing"),
        (["-m", "data.seq_len=16,24", "sweep=last", "seed=1"], "job 0 was without it, but would now be seed=1"),
        (["-m", "data.seq_len=16,24", "sweep=last", "name=other"], "sweep=last: no sweep in outputs/other/sweeps"),
        (["-m", "data.seq_len=16,24", "sweep=a,b"], "sweep: give one name"),
        (["sweep=last"], "sweep=...: give -m as well; to resume a single run, give ckpt_path=last"),
    ],
)
def test_other_jobs_are_refused(train, tmp_path, failed_sweep, arguments, message):
    failing = ["strategy=plain", "data.path=nowhere"]
    if not (failed_sweep / "outputs").exists():
        assert train("-m", *failing, "data.seq_len=16,24")[0] == 1
        (tmp_path / "outputs").rename(failed_sweep / "outputs")
    shutil.copytree(failed_sweep / "outputs", tmp_path / "outputs", symlinks=True)
    status, _, err = train(*failing, *arguments)
    assert status == 2
    (error,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in error
    assert len(load_runs(tmp_path / SWEEP)) == 2


@pytest.mark.slow
def test_jobs_have_as_many_processes_as_they_need(train, tmp_path):
    failing = ["strategy=plain", "data.max_bytes=25000", "data.batch_size=1,300"]
    sweep = ["python", *MODULE, "-m", *TINY_RUN, *WITHOUT_REPORT, "trainer.devices=1,2", *failing]
    status, out, err = run_command(sweep, tmp_path)
    assert status == 1, err
    runs = load_runs(tmp_path / SWEEP)
    assert [(run.status, run.processes) for run in runs] == [("ok", 1), ("ok", 1), ("ok", 2), ("failed", 1)]
    assert runs[0].train_loss == pytest.approx(runs[2].train_loss, rel=0.1)
    assert "data.batch_size=300 on 2 data-parallel processes" in runs[3].message
    assert "Traceback" not in err
    assert out.count(" Sweep ") == 1


@pytest.mark.slow
def test_processes_end_with_the_sweep_and_their_job_goes_on(tmp_path):
    settings = ["trainer.devices=2", "strategy.context_parallel_size=2", "strategy.alpha=0.5", *SHORT]
    assert interrupted(tmp_path, signal.SIGKILL, *settings, job=0, cold=True) == -signal.SIGKILL
    deadline = time.monotonic() + 240
    while (left := commands_with(str(tmp_path))) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    assert load_runs(tmp_path / SWEEP) == []
    lost = max(map(last_step, (tmp_path / SWEEP / "0" / "checkpoints").glob("step-*.ckpt")))
    for more in (["-m", "sweep=last"], ["name=whole"]):
        flags = [each for each in more if each == "-m"]
        status, _, err = run_command(
            ["python", *MODULE, *flags, *TINY_RUN, *WITHOUT_REPORT, *settings, more[-1]], tmp_path
        )
        assert status == 0, err
    (whole,) = (tmp_path / "outputs/whole/runs").iterdir()
    assert "resuming from" in (tmp_path / SWEEP / "0" / "train.log").read_text()
    assert rows(tmp_path / SWEEP / "0", lost) == rows(whole, lost)
    assert [run.processes for run in load_runs(tmp_path / SWEEP)] == [2]


def commands_with(text):
    """Process ids of all commands that contain a text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if text in path.read_text():
                found.append(path.parent.name)
    return found
