"""The pages of performance: what they say of results that are written here; those in the project are up to date."""

from __future__ import annotations

import csv
import json
import shutil
import sys

import pytest
from support.benchmark_modules import ROOT, load

pytestmark = pytest.mark.usefixtures("own_modules")

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def make(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["performance.py", *map(str, arguments)])
    return load("performance").main()


def result(method, tokens, seconds=None, layers=8, status="ok", reason="", loss=11.0, norm=1.0, **more):
    """A cell of the tests' own GPU, which computes 1e15 FLOP/s at most."""
    cell = {"method": method, "tokens": tokens, "model": "llama3_8b", "layers": layers, "tuning": "full"}
    timed = {
        "median_seconds": seconds, "tokens_per_second": tokens / seconds, "mfu": 0.5, "hfu": 0.6,
        "losses": [loss], "gradient_norm": norm,
        "memory": {"peak_reserved_bytes": 2**30, "alloc_retries": 0, "peak_rss_bytes": 2**31},
        "waits": None, "activity": None, "packages": [], "settled": True, "steps": {"warmup": 1}, "seconds": [seconds],
        "plan": {
            "mode": "memo", "alpha": 0.25, "schedule": "layer", "host_backed": "none", "memory_planned": False,
        } if method.startswith("memo") else None, "swapped_host_bytes": 2**30,
    } if seconds else {}  # fmt: skip
    made = {
        "date": "2027-01-02T03:04:05",
        "commit": "c0ffee",
        "command": "python benchmarks/gpu.py",
        "device": "Some GPU",
        "versions": {},
    }
    return {"cell": cell, "status": status, "reason": reason, **made, **timed, **more}


@pytest.fixture
def project(tmp_path):
    """A copy of the project's results and README, and a place for pages."""
    results = tmp_path / "results"
    left_out = shutil.ignore_patterns("gpu", "gradients*", "rehearsed*", "*.png")
    shutil.copytree(ROOT / "benchmarks" / "results", results, ignore=left_out)
    shutil.copy(ROOT / "README.md", tmp_path / "README.md")
    return tmp_path


def write(project, *results):
    for number, one in enumerate(results):
        path = project / "results" / "gpu" / "some_gpu" / "group" / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one))


def pages(monkeypatch, project):
    options = ("--results", project / "results", "--page", project / "docs" / "p.md", "--readme", project / "README.md")
    assert make(monkeypatch, *options) == 0
    assert make(monkeypatch, *options, "--check") == 0
    return (project / "docs" / "p.md").read_text(), (project / "README.md").read_text()


def rows(page, title):
    """The cells of the table below a line that starts so."""
    lines = page.partition(title)[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()
    return {cells[0]: cells[1:] for line in lines[2:] for cells in [[c.strip() for c in line.strip("|").split("|")]]}


def cells(project):
    """The rows of the table of all cells, by method."""
    found = csv.DictReader((project / "results" / "cells.csv").read_text().splitlines())
    return {row["method"]: row for row in found}


def test_the_projects_pages_are_what_its_results_say(monkeypatch, capsys):
    assert make(monkeypatch, "--check") == 0, capsys.readouterr().err


def test_a_page_that_is_out_of_date_is_told(monkeypatch, project, capsys):
    pages(monkeypatch, project)
    write(project, result("plain", 4096, 1.0))
    options = ("--results", project / "results", "--page", project / "docs" / "p.md", "--readme", project / "README.md")
    assert make(monkeypatch, *options, "--check") == 1
    assert "p.md is not what the results say" in capsys.readouterr().err


def test_without_results_of_a_gpu_it_says_so_and_how_to_get_them(monkeypatch, project):
    for page in pages(monkeypatch, project):
        assert "bash benchmarks/lease.sh" in page
        assert "measured" in page
        assert "### NVIDIA" not in page and "On one NVIDIA" not in page


def test_ratios_are_times_over_times(monkeypatch, project):
    write(
        project,
        result("plain", 65536, status="oom", reason="CUDA out of memory"),
        result("checkpointing", 65536, 12.0),
        result("alst", 65536, 11.0),
        result("memo_auto", 65536, 10.0),
        result("plain", 65536, 2.0, layers=1),
        result("plain", 65536, 3.0, layers=2),
        result("plain_liger", 65536, 2.0, layers=2),
    )
    page, readme = pages(monkeypatch, project)
    # One layer takes a second, and eight take 2 + 7.
    assert rows(page, "**Speedup of Memo**") == {
        "64K": ["Memo auto, memory planned", "1.100 <small>DeepSpeed ALST</small>", "1.200", "0.900"]
    }
    row = ["llama3_8b, 8 layers, full, sdpa", "64K", *rows(page, "**Speedup of Memo**")["64K"]]
    assert f"| {' | '.join(row)} |" in readme
    speeds = rows(page, "**Tokens per second")
    assert speeds["plain"] == ["oom"]
    assert speeds["Memo auto, memory planned"] == ["6,554 (50.0%)"]
    assert page.count("\n#### ") == 1, "the layers that tell the bound are no group of their own"
    picture = next((project / "docs" / "images").iterdir())
    assert picture.read_bytes().startswith(PNG_SIGNATURE)
    assert f"(images/{picture.name})" in page


def test_cells_that_had_not_settled_are_shown_and_compared_with_nothing(monkeypatch, project):
    write(
        project,
        result("checkpointing", 65536, 12.0),
        result("memo_auto", 65536, 8.0, settled=False),
        result("memo_auto_unplanned", 65536, 9.0, steps={"warmup": 0}),
        result("memo_alpha_0", 65536, 10.0),
    )
    page, _ = pages(monkeypatch, project)
    assert rows(page, "**Speedup of Memo**") == {
        "64K": ["Memo, alpha 0", "1.200 <small>checkpointing</small>", "1.200"]
    }
    assert rows(page, "**Tokens per second")["Memo auto, memory planned"] == ["8,192 (50.0%), not settled"]
    found = cells(project)
    for method, settled in {"Memo auto, memory planned": "no", "Memo auto": "no", "Memo, alpha 0": "yes"}.items():
        assert found[method] | {
            "plan": "alpha 0.250, schedule layer", "swapped [GiB]": "1.0", "memory": "PyTorch's allocator",
            "settled": settled, "timed steps": "1",
        } == found[method]  # fmt: skip
    assert (found["checkpointing"]["plan"], found["checkpointing"]["host process [GiB]"]) == ("", "2.0")


@pytest.mark.parametrize("other", [{"date": "2027-01-03T00:00:00"}, {"commit": "decade"}, {"commit": None}])
def test_cells_of_other_days_and_commits_are_in_other_tables(monkeypatch, project, other):
    write(project, result("checkpointing", 65536, 12.0), result("memo_auto", 65536, 10.0, **other))
    page, readme = pages(monkeypatch, project)
    assert page.count("\n#### ") == 2
    assert "**Speedup of Memo**" not in page and "1.200" not in readme


def test_alphas_are_compared_with_the_fastest_of_them(monkeypatch, project):
    times = {"memo_alpha_0": 12.5, "memo_alpha_0.25": 10.0, "memo_alpha_1": 20.0, "memo_auto_unplanned": 10.1}
    write(project, *[result(method, 65536, seconds) for method, seconds in times.items()])
    page, _ = pages(monkeypatch, project)
    assert rows(page, "**Speed by alpha")["64K"] == ["0.800", "1.000", "0.500", "0.990", "0.250"]


def test_the_table_of_cells_tells_copies_by_stream_and_cells_without_a_time(monkeypatch, project):
    waits = {"step_seconds": 10.0, "waited_seconds": {"offload": 0.25, "prefetch": 0.5}}
    activity = {"exposed_copy_seconds": 1.0, "idle_seconds": 0.75}
    write(
        project,
        result("memo_auto", 65536, 10.0, waits=waits),
        result("alst", 65536, 10.0, activity=activity),
        result("plain", 65536, status="oom", reason="CUDA out of memory"),
    )
    pages(monkeypatch, project)
    names = ["waits, offload [s]", "waits, prefetch [s]", "copies alone [s]", "idle [s]"]
    found = {method: [row[name] for name in names] for method, row in cells(project).items()}
    assert found["Memo auto, memory planned"] == ["0.250", "0.500", "", ""]
    assert found["DeepSpeed ALST"] == ["", "", "1.000", "0.750"]
    assert cells(project)["plain"] | {"status": "oom", "step [s]": "", "commit": "c0ffee"} == cells(project)["plain"]


def test_the_longest_length_and_what_ended_it(monkeypatch, project):
    write(
        project,
        result("alst", 65536, 10.0), result("alst", 131072, status="oohm", reason="killed"),
        result("memo_auto", 65536, 10.0), result("memo_auto", 131072, 30.0),
        result("memo_auto", 262144, status="timeout"),
    )  # fmt: skip
    page, _ = pages(monkeypatch, project)
    longest = rows(page, "**Longest sequence")
    assert longest == {"DeepSpeed ALST": ["64K", "128K: oohm"], "Memo auto, memory planned": ["128K", "256K: timeout"]}


def test_a_method_that_computes_something_else_is_told(monkeypatch, project):
    alike = [result(m, 65536, 10.0, norm=1.01) for m in ("plain", "checkpointing", "memo_alpha_0")]
    write(project, *alike, result("alst", 65536, 5.0, loss=11.1), result("memo_auto", 65536, 5.0, norm=0.9))
    page, _ = pages(monkeypatch, project)
    assert "**DeepSpeed ALST at 64K: its first loss is 0.9% off the others', so its time is not comparable.**" in page
    assert "**Memo auto, memory planned at 64K: its first gradient's norm is 10.9% off the others'" in page
    assert page.count("so its time is not comparable") == 2


def test_a_missing_package_is_no_failure(monkeypatch, project):
    write(
        project,
        result("plain", 65536, 10.0),
        result("alst", 65536, status="unavailable", reason="deepspeed is not installed"),
        result("async_offload", 65536, status="unavailable", reason="needs a GPU: of another kind"),
    )
    speeds = rows(pages(monkeypatch, project)[0], "**Tokens per second")
    assert (speeds["DeepSpeed ALST"], speeds["async offload"]) == (["not installed"], ["not available"])


def test_a_file_that_is_no_result_is_told(monkeypatch, project, capsys):
    write(project, {"cell": {"tokens": 3}})
    options = ("--results", project / "results", "--page", project / "p.md", "--readme", project / "README.md")
    assert make(monkeypatch, *options) == 2
    assert "0.json: no result of benchmarks/gpu.py" in capsys.readouterr().err
    (project / "README.md").write_text("no marks")
    (project / "results" / "gpu" / "some_gpu" / "group" / "0.json").unlink()
    assert make(monkeypatch, *options) == 2
    assert "the README needs the lines" in capsys.readouterr().err


def keep_simulated(folder, made):
    memory = {"peak_allocated_bytes": 2**34, "peak_pinned_bytes": 5}
    for number, one in enumerate(made):
        one["device"] = "Some GPU (simulated)"
        one |= {
            "simulated": {},
            "memory": one.get("memory", {}) | memory,
            "swapped_host_bytes": 2**30 * one["cell"]["method"].count("memo"),
        }
        path = folder / "64GiB" / "some_gpu" / "group" / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one))


def test_simulated_results_are_said_to_be_simulated(monkeypatch, project):
    made = [
        result("checkpointing", 4096, 3.0, layers=None),
        result("memo_alpha_0", 4096, 2.5, layers=None),
        result("memo_auto_unplanned", 4096, 2.0, layers=None),
        result("memo_kinds", 4096, layers=None, status="oohm"),
        *(result("plain", 4096, seconds, layers=layers) for layers, seconds in ((1, 0.1), (2, 0.15))),
    ]
    keep_simulated(project / "results" / "rehearsed", made)
    page, readme = pages(monkeypatch, project)
    assert "Nothing in this section was measured on a GPU" in page and "*simulated*" in readme
    found = rows(page, "**llama3_8b, all weights trained**")
    assert found["checkpointing"] == ["3.00 s"]
    assert found["Memo auto"] == ["2.00 s <small>16.0 GiB, 1.0 GiB</small>"]
    assert found["Memo by kinds"] == ["oohm"]
    assert found["bound"] == ["1.65 s"]
    assert found["Memo's default: times as fast"] == ["1.500 <small>checkpointing</small>"]
    assert rows(readme, "**Some GPU (simulated)**")["llama3_8b, full, 64GiB of host memory"] == ["1.500"]


def test_measured_cells_are_set_beside_rehearsals_of_their_day(monkeypatch, project):
    memory = {"peak_reserved_bytes": 2**30, "alloc_retries": 0, "peak_rss_bytes": 2**31, "peak_allocated_bytes": 2**30}
    write(project, result("checkpointing", 4096, 2.0, memory=memory))
    keep_simulated(project / "results" / "rehearsed_measured", [result("checkpointing", 4096, 2.1)])
    (project / "results" / "rehearsed_measured" / "64GiB").rename(project / "results" / "rehearsed_measured/2027-01-02")
    page, _ = pages(monkeypatch, project)
    found = rows(page, "The rates of the simulated device were fitted")["llama3_8b, full, 4K: checkpointing"]
    assert found == ["2.00 s", "2.10 s", "+5.0%", "1.0 GiB", "16.0 GiB"]


def test_the_longest_sequences_are_in_a_table_of_their_own(monkeypatch, project):
    folder = project / "results" / "rehearsed_longest"
    keep_simulated(folder, [result("memo_auto_unplanned", n, 7.0, layers=None) for n in (2**21, 2**20)])
    page, _ = pages(monkeypatch, project)
    table = page.partition("### The longest sequences")[2]
    seconds = "7.00 s <small>16.0 GiB, 1.0 GiB</small>"
    row = f"| llama3_8b | all weights trained | Some GPU (simulated) | 64GiB | {{}} | {seconds} |"
    assert 0 < table.index(row.format("1,048,576")) < table.index(row.format("2,097,152"))


def test_the_parts_of_alst_have_a_section_that_names_their_version(monkeypatch, project):
    packages = ["deepspeed 1.2.3"]
    made = [
        result("checkpointing", 4096, layers=None, status="oom"),
        result("alst", 4096, 5.0, layers=None, packages=packages),
        result("alst_reentrant", 4096, 4.0, layers=None, packages=packages),
        result("memo_auto_unplanned", 4096, 2.0, layers=None),
    ]
    keep_simulated(project / "results" / "rehearsed_alst", made)
    page, readme = pages(monkeypatch, project)
    section = page.partition("### Beside the parts of ALST")[2]
    assert "activations on one GPU (deepspeed 1.2.3)" in section
    found = rows(section, "**Some GPU (simulated), 64GiB of host memory: llama3_8b, all weights trained**")
    assert found == {
        "checkpointing": ["oom"],
        "DeepSpeed ALST": ["5.00 s"],
        "ALST, reentrant checkpoints": ["4.00 s"],
        "Memo auto": ["2.00 s <small>16.0 GiB, 1.0 GiB</small>"],
        "Memo's default: times as fast": ["2.000 <small>ALST, reentrant checkpoints</small>"],
    }
    assert "Some GPU" not in readme, "the README compares with the methods of the main tables"


def test_the_first_screen_says_what_the_results_say():
    """The ratios of the sentences above the tables of the README and of the site."""
    comparison, performance = load("pages.comparison"), load("performance")
    results = ROOT / "benchmarks" / "results"

    def group_of(found, day=""):
        groups = comparison.groups_of(found)
        return next(g for g in groups if g.cell.group == "llama3_8b-all-lora-cudnn" and g.code.startswith(day))

    hosts = {host: found for host, _, found in performance.load_rehearsed(results / "rehearsed")}
    simulated = group_of(hosts["128GiB"])
    best = {n: simulated.best_other(n * 1024) for n in (64, 128, 256)}
    assert best[64][0] == best[128][0] == "selective_liger" != best[256][0]
    over = {n: f"{best[n][1] / simulated.default(n * 1024)[1]:.2f}" for n in best}
    single = {n: simulated.best_other(n * 1024, fused=False) for n in (64, 128)}
    assert single[64][0] == single[128][0] == "selective"
    over_single = {n: f"{single[n][1] / simulated.default(n * 1024)[1]:.2f}" for n in single}
    measured = group_of(performance.load_devices(results / "gpu")["NVIDIA H200"], "2026-11-26")
    seconds = [measured.seconds(method, 65536) for method in ("checkpointing", "memo_alpha_0")]
    readme, site = (" ".join((ROOT / path).read_text().split()) for path in ("README.md", "docs/index.md"))
    times = f"{over_single[64]} times (64K tokens) and {over_single[128]} times (128K) as fast as with selective"
    assert times in readme
    assert f"{over[64]} and {over[128]} times as fast as with liger-kernel in addition" in readme
    assert f"{over[256]} times (256K) as fast as with the fastest method that fits" in readme
    assert f"{over[128]} to {over[64]} times as fast" in site
    assert f"a step is {over[256]} times as fast as with the fastest method that fits" in site
    assert f"{seconds[0] / seconds[1]:.2f} times as fast as with gradient checkpointing" in readme


def test_a_simulated_group_has_expected_times_starts_and_both_kinds_of_kernels():
    page, whole = load("pages.simulated_page"), {"layers": None}
    plan = {"alpha": 0.0, "expected_seconds": 8.25}
    cells = [
        result("checkpointing", 65536, 12.0, first_step_seconds=12.5, **whole),
        result("selective", 65536, 10.5, **whole),
        result("selective_liger", 65536, 9.0, **whole),
        result("memo_auto_without_triton", 65536, 10.0, **whole),
        result("memo_auto_unplanned", 65536, 8.0, plan=plan, first_planned_step_seconds=26.0, **whole),
        *(result("plain", 65536, seconds, layers=n) for n, seconds in ((1, 2.0), (2, 2.25))),
        *(result("plain_liger", 65536, seconds, layers=n) for n, seconds in ((1, 1.5), (2, 1.625))),
    ]
    for cell in cells:
        cell.get("memory", {}).update({"peak_allocated_bytes": 2**30, "peak_pinned_bytes": 0})
    text = page.section("128GiB", "Some GPU (simulated)", cells)
    for row in (
        "| expected by Memo's plan | 8.25 s |",
        "| start of Memo (first step of checkpointing) | 18.00 s (12.50 s) |",
        "| bound | 9.75 s |",
        "| bound + liger-kernel | 5.38 s |",
        "| Memo auto, without Triton: times as fast | 1.050 <small>selective checkpointing</small> |",
        "| Memo's default: times as fast | 1.125 <small>selective checkpointing + liger-kernel</small> |",
    ):
        assert row in text
