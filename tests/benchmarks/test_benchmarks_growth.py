"""The benchmark of device memory against the length of the sequence, at sizes that take seconds."""

import json
import os
import subprocess
from pathlib import Path

from support import warm
from support.paths import ROOT

TINY = ("--hidden", "32", "--slice-tokens", "64", "--block-tokens", "64", "--lengths", "256", "512")


def test_peaks_are_measured_and_do_not_grow(tmp_path: Path) -> None:
    process = subprocess.run(
        [warm.tools() / "python", ROOT / "benchmarks" / "growth.py", "--quick", *TINY, "--output", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    report = json.loads((tmp_path / "growth.json").read_text())
    assert (report["settings"]["layers"], report["settings"]["hidden"]) == (2, 32)
    assert [(row["stream_from_host"], row["tokens"]) for row in report["results"]] == [
        (level, tokens) for level in ("hidden", "model") for tokens in (256, 512)
    ]
    for short, long in zip(report["results"][::2], report["results"][1::2], strict=True):
        assert short["overflow_bytes"] == long["overflow_bytes"] == 0
        assert 0 < long["peak_bytes"] <= 1.05 * short["peak_bytes"]
        assert long["host_bytes"] > 1.9 * short["host_bytes"]
    assert "1.0" in process.stdout and "512" in process.stdout
