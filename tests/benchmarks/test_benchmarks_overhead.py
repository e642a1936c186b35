"""The benchmark of what MemoStrategy costs where it has nothing to do, at sizes that take seconds."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from support import warm
from support.benchmark_modules import benchmark_modules
from support.paths import ROOT

SIZES = ("--shapes", "2x32", "--lengths", "16", "--launches", "2", "--rounds", "3", "--turn-seconds", "0.02")


@pytest.mark.slow
def test_methods_take_turns_and_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "overhead.json"
    process = subprocess.run(
        [warm.tools() / "python", ROOT / "benchmarks" / "overhead.py", *SIZES, "--methods", "memo", "--output", path],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    plain, memo = json.loads(path.read_text())["results"]
    assert (plain["method"], memo["method"]) == ("plain", "memo")
    assert plain["ratio"] == plain["core_ratio"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    for row in (plain, memo):
        for times in (row["seconds"], row["core_seconds"]):
            assert [len(launch) for launch in times] == [3, 3]
            assert min(map(min, times)) > 0
    assert memo["ratio"]["low"] <= memo["ratio"]["mean"] <= memo["ratio"]["high"]


def test_ratios_are_taken_within_a_round() -> None:
    """A machine of which the speed changes tenfold gives the ratio that a steady one gives."""
    with benchmark_modules():
        from overhead import ratio

        plain = [[0.1, 1.0, 0.5], [0.2, 0.7, 10.0]]
        found = ratio([[1.02 * seconds for seconds in launch] for launch in plain], plain)
    assert found == pytest.approx({"mean": 1.02, "low": 1.02, "high": 1.02})


def test_the_interval_covers_differences_between_launches() -> None:
    """Rounds of a process agree with each other better than with those of the next process."""
    with benchmark_modules():
        from overhead import ratio

        found = ratio([[0.9] * 40, [1.1] * 40, [0.9] * 40, [1.1] * 40], [[1.0] * 40] * 4)
    assert found["mean"] == pytest.approx(1.0)
    assert found["low"] == pytest.approx(0.9) and found["high"] == pytest.approx(1.1)
