"""benchmarks/gradients.py: gradients of a step beside those of plain training."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from support import warm

ROOT = Path(__file__).parents[2]
CPU = ("--device", "cpu", "--quick")


def run(*options: str | Path) -> subprocess.CompletedProcess[str]:
    command = [warm.tools() / "python", ROOT / "benchmarks" / "gradients.py", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.slow
def test_what_is_stored_whole_is_as_plain_training_and_slices_round(tmp_path: Path) -> None:
    done = run(*CPU, "--full", "--runs", "alpha 1", "slices, all on the host", "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    rows = {row["run"]: row for row in json.loads((tmp_path / "gradients-cpu.json").read_text())["rows"]}
    assert list(rows) == ["plain", "alpha 1", "slices, all on the host"]
    assert rows["plain"]["to_full"]["all"] == rows["alpha 1"]["to_plain"]["farthest"] == 0.0
    assert 0.0 < rows["slices, all on the host"]["to_plain"]["farthest"] < 1e-5


def test_a_run_that_is_not_known_is_told(tmp_path: Path) -> None:
    done = run(*CPU, "--runs", "alpha 2", "--output", tmp_path)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("--runs alpha 2: there is no such run; give some of plain; ")
