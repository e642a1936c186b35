"""The benchmark of packed documents that are shared out by length or by cost, at a size that takes seconds."""

import json
import os
import subprocess
from pathlib import Path

from support import warm
from support.paths import ROOT


def test_sharing_out_by_cost_is_faster(tmp_path: Path) -> None:
    process = subprocess.run(
        [
            warm.tools() / "python", ROOT / "benchmarks" / "balance.py", "--documents", "1000", "--seq-len", "16384",
            "--output", str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    report = json.loads((tmp_path / "balance.json").read_text())
    assert [(row["data_parallel"], row["ring"]) for row in report["results"]] == [(8, 1), (1, 8), (8, 8)]
    for row in report["results"]:
        assert row["ratio"] > 1.02
        assert 1 <= row["by_cost_slowest"] < row["by_length_slowest"]
