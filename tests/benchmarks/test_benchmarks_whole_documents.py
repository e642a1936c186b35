"""The benchmark of documents that are divided over a ring or lie whole on a process, at a size that takes seconds."""

import json
import os
import subprocess
from pathlib import Path

from support import warm
from support.paths import ROOT


def test_documents_that_stay_whole_are_faster(tmp_path: Path) -> None:
    process = subprocess.run(
        [
            warm.tools() / "python", ROOT / "benchmarks" / "whole_documents.py", "--documents", "400", "--seq-len",
            "65536", "--output", str(tmp_path),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "whole_documents.json").read_text())["results"]
    assert [row["ring"] for row in results] == [4, 8, 16, 32] * 2
    for row in results:
        assert row["ratio"] > (0.999 if row["batches"] == "packed" else 3)
        assert 0 < row["placed_steps"] <= row["steps"]
