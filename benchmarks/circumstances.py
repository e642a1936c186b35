"""The circumstances of a measurement, which every published number depends on."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lightning_memo.utils.files import replacing


def circumstances(packages: Sequence[str]) -> dict[str, Any]:
    """Returns the command, date, commit, versions of Python and packages, processor, and the simulated machine."""
    machine = simulated_machine()
    return {
        **({} if machine is None else {"simulated": machine}),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **{package: version_of(package) for package in packages}},
        "cpu": {"name": cpu_name(), "cores": os.cpu_count(), "load": os.getloadavg()},
    }


def save_report(path: Path, report: dict[str, Any]) -> None:
    """Writes a report as JSON. Of a command that is ended meanwhile, nothing is written."""
    with replacing(path) as unfinished:
        unfinished.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def commit() -> str | None:
    """Returns the commit of this checkout, with "-dirty" if code differs from it.

    Outside of a repository, `COMMIT` of the environment tells it, and without that it is `None`.
    """
    root = Path(__file__).parents[1]
    try:
        head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT")
    code = ["lightning_memo", "conf", "benchmarks", ":!benchmarks/results"]
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *code], cwd=root).returncode
    return head.stdout.decode().strip() + ("-dirty" if changed else "")


def simulated_machine() -> dict[str, float] | None:
    """Returns the numbers of the machine whose time is simulated, see benchmarks/rehearse.py; `None` for a real one."""
    simulates = os.environ.get("EMULATED_CUDA_SIMULATE", "0") != "0"
    return json.loads(os.environ["EMULATED_CUDA_MACHINE"]) if simulates else None


def version_of(package: str) -> str:
    """Returns the version of a package; "not installed" also for a package that only PYTHONPATH finds."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def cpu_name() -> str:
    """Returns the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
