import pytest
from PIL import Image
from rich.console import Console

from lightning_memo.summary import RunSummary
from lightning_memo.sweep import draw, load_runs, sweep_table, swept_settings


def run(seq_len, *more, **changes):
    results = {
        "seq_len": seq_len,
        "batch_size": 1,
        "alpha": 0.25,
        "step_seconds": seq_len / 1000,
        "tokens_per_second": 1000.0,
        "peak_device_bytes": seq_len * 2**20,
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
    assert swept_settings([run(1), run(2), FAILED]) == ["data.seq_len"]
    assert swept_settings([run(1), run(1, "trainer.max_steps=3")]) == ["trainer.max_steps"]
    assert swept_settings([run(1)]) == []


def test_table_has_all_results_in_a_row():
    lines = text(sweep_table([run(512), FAILED]), width=80).splitlines()
    row = next(line for line in lines if "512" in line and "MiB" in line)
    assert row.split() == ["512", "0.512", "1,000", "512.0", "MiB", "3.0", "MiB", "0.25", "2.500", "2.625"]
    assert any("data.seq_len=9 failed: data.seq_len=9: too long" in line for line in lines)


def test_summary_comes_back_as_it_was_written(tmp_path):
    for number, seq_len in ((10, 1), (9, 2)):
        run(seq_len).save(tmp_path / str(number))
    assert load_runs(tmp_path) == [run(2), run(1)]


@pytest.mark.parametrize("runs", [[run(512), FAILED, run(1024, alpha=None)], [run(512)]], ids=["failed", "single"])
def test_picture(tmp_path, runs):
    draw(runs, tmp_path / "sweep.png")
    with Image.open(tmp_path / "sweep.png") as picture:
        assert picture.format == "PNG"
        assert len(picture.convert("L").getcolors()) > 10
    assert len(list(tmp_path.iterdir())) == 1


def test_sweep_reports_all_jobs_and_failures(train, tmp_path):
    status, out, err = train("-m", "strategy=plain", "data.seq_len=16,90000,32")
    assert status == 1, err
    assert out.count("Sweep\n") + out.count("Sweep ") == 1
    table = out[out.rindex("Sweep") :]
    assert "data.seq_len=90000 failed: data.seq_len=90000" in table
    (folder,) = tmp_path.glob("outputs/train/sweeps/*")
    assert [summary.status for summary in load_runs(folder)] == ["ok", "failed", "ok"]
    assert [summary.seq_len for summary in load_runs(folder)] == [16, 90000, 32]
    assert (folder / "sweep.png").stat().st_size > 10_000
    assert "Traceback" not in err
