"""The benchmark of attention kernels and of layers by fused ones, on a CPU, and the page's part about it."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys

import pytest
import torch
from support.benchmark_modules import ROOT, load

pytestmark = pytest.mark.usefixtures("own_modules")


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["kernel_times.py", *map(str, arguments)])
    return load("kernel_times").main()


@pytest.fixture(scope="module")
def report(own_modules, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "liger_kernel.transformers", None)
        assert run(patch, "--device", "cpu", "--quick", "--output", folder) == 0
    (path,) = folder.iterdir()
    return json.loads(path.read_text())


def test_what_runs_is_measured_and_what_does_not_says_why(report):
    rows = {(row["what"], row["name"], row["tokens"]): row for row in report["results"]}
    layers = ("transformers", "fused_kernels", "liger-kernel")
    kinds = [("attention", "sdpa"), ("attention", "replay"), *(("layer", name) for name in layers)]
    assert list(rows) == [(*kind, n) for what in ("attention", "layer") for n in (64, 128)
                          for kind in kinds if kind[0] == what]  # fmt: skip
    for (what, name, tokens), row in rows.items():
        if name == "liger-kernel":
            assert (row["status"], row["seconds"], row["median_seconds"], row["ratio"]) == (
                "unavailable",
                [],
                None,
                None,
            )
            assert "lightning-memo[liger]" in row["reason"]
            continue
        assert (row["status"], row["reason"]) == ("ok", "")
        assert len(row["seconds"]) == 2
        assert row["seconds"] == [a + b for a, b in zip(row["forward_seconds"], row["backward_seconds"], strict=True)]
        assert min(row["forward_seconds"] + row["backward_seconds"]) > 0
        assert row["kept_bytes"] > 0
        first = rows[what, "sdpa" if what == "attention" else "transformers", tokens]
        assert row["ratio"]["min"] <= row["seconds"][0] / first["seconds"][0] <= row["ratio"]["max"]
    assert report["settings"]["dtype"] == "float32"
    assert torch.__version__.startswith(report["versions"]["torch"])  # the wheels of CUDA builds leave "+cu130" out


def test_bytes_that_attention_and_a_layer_keep(report):
    rows = {(row["name"], row["tokens"]): row["kept_bytes"] for row in report["results"]}
    shape = load("kernel_work").load_model("llama_tiny")
    of_token = 4 * shape.head_dim * 2 * (shape.heads + shape.kv_heads) + 4 * shape.heads
    assert rows["sdpa", 64] == 64 * of_token
    assert rows["transformers", 128] > rows["sdpa", 128] + 128 * 4 * shape.hidden
    assert rows["transformers", 128] == pytest.approx(2 * rows["transformers", 64], rel=0.01)


def test_running_out_of_memory_is_a_row(monkeypatch, tmp_path):
    times = load("kernel_times")

    class Large:
        kept_bytes = 0

        def forward(self):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(times, "layer_works", lambda *_: iter([("layer", "large", Large)]))
    assert run(monkeypatch, "--device", "cpu", "--quick", "--output", tmp_path) == 0
    rows = json.loads(next(tmp_path.iterdir()).read_text())["results"]
    assert [(row["status"], row["reason"]) for row in rows if row["what"] == "layer"] == [
        ("oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate")
    ] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_how_to_try_it(monkeypatch, capsys):
    assert run(monkeypatch) == 2
    assert capsys.readouterr().err == "--device cuda: PyTorch finds no GPU; --device cpu --quick tries things out\n"


def test_bad_lengths_are_refused(monkeypatch, capsys):
    with contextlib.suppress(SystemExit):
        run(monkeypatch, "--lengths", "long")
    assert "'long' is no number of tokens: give one like 65536, 64K or 1M" in capsys.readouterr().err


# ---- the page


def page_of(monkeypatch, tmp_path, report):
    results = tmp_path / "results"
    shutil.copytree(ROOT / "benchmarks" / "results", results, ignore=shutil.ignore_patterns("gpu", "kernels", "*.png"))
    (results / "kernels").mkdir()
    (results / "kernels" / "some_gpu.json").write_text(json.dumps(report))
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    options = ("--results", results, "--page", tmp_path / "p.md", "--readme", tmp_path / "README.md")
    monkeypatch.setattr(sys, "argv", ["performance.py", *map(str, options)])
    status = load("performance").main()
    return status, (tmp_path / "p.md").read_text() if status == 0 else ""


def test_the_page_has_the_numbers_of_a_gpu(monkeypatch, tmp_path, report):
    report = report | {"device": "Some GPU", "settings": report["settings"] | {"device": "cuda"}}
    status, page = page_of(monkeypatch, tmp_path, report)
    assert status == 0
    told = page.partition("## Kernels on Some GPU")[2].partition("## Without a GPU")[0]
    replay = next(r for r in report["results"] if (r["name"], r["tokens"]) == ("replay", 128))
    assert f"{1e3 * replay['median_seconds']:.3g} ms ({replay['ratio']['median']:.3f}) |" in told
    assert "| liger-kernel | unavailable | unavailable |" in told
    assert report["command"] in told


def test_the_page_has_no_numbers_of_a_cpu(monkeypatch, tmp_path, report):
    status, page = page_of(monkeypatch, tmp_path, report)
    assert status == 0
    assert "Kernels on" not in page


def test_a_file_that_is_no_report_is_told(monkeypatch, tmp_path, capsys):
    assert page_of(monkeypatch, tmp_path, {"command": "other"})[0] == 2
    assert "some_gpu.json: no report of benchmarks/kernel_times.py" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_large_attention_needs_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["large_attention.py"])
    assert load("large_attention").main() == 2
    assert capsys.readouterr().err == "PyTorch finds no GPU, and these kernels are CUDA's\n"
