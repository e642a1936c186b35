"""The benchmark of planned memory for steps that differ, at sizes that take seconds."""

import json
import sys
from pathlib import Path

import pytest
from support.benchmark_modules import load
from support.markers.extras import needs_compiler
from support.markers.slow import slow_if

pytestmark = [needs_compiler, pytest.mark.usefixtures("own_modules")]
ROWS = ["documents", "eight lengths", "any length", "documents, any length"]


@slow_if(lambda rows: len(rows) > 1)
@pytest.mark.parametrize("rows", [ROWS[1:2], ROWS], ids=["one", "all"])
def test_requests_are_counted_and_served(
    rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark = load("varying_steps")
    monkeypatch.setattr(benchmark, "_ROWS", [each for each in benchmark._ROWS if each.name in rows])
    monkeypatch.setattr(sys, "argv", ["varying_steps.py", "--quick", "--settings", "plain", "--output", str(tmp_path)])
    benchmark.main()
    report = json.loads((tmp_path / "varying_steps.json").read_text())
    assert [row["rows"] for row in report["results"]] == rows
    for row in report["results"]:
        assert row["plans"] >= 1 and row["steps"] >= 8
        assert row["hits"] > 0 and row["fitted"] > 0
        assert row["hits"] + row["fitted"] > 0.98 * (row["hits"] + row["fitted"] + row["misses"])
    assert "in the arena" in capsys.readouterr().out
