"""The benchmark of planned memory for steps that differ, at sizes that take seconds."""

import json
import os
import subprocess
from pathlib import Path

from support import warm
from support.markers.extras import needs_compiler
from support.paths import ROOT

pytestmark = needs_compiler


def test_requests_are_counted_and_served(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "varying_steps.py"
    process = subprocess.run(
        [warm.tools() / "python", script, "--quick", "--settings", "plain", "--output", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    report = json.loads((tmp_path / "varying_steps.json").read_text())
    assert [row["rows"] for row in report["results"]] == [
        "documents", "eight lengths", "any length", "documents, any length",
    ]  # fmt: skip
    for row in report["results"]:
        assert row["plans"] >= 1 and row["steps"] >= 8
        assert row["hits"] > 0 and row["fitted"] > 0
        assert row["hits"] + row["fitted"] > 0.98 * (row["hits"] + row["fitted"] + row["misses"])
    assert "in the arena" in process.stdout
