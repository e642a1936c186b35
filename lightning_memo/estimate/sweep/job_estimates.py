"""Estimates of the jobs of a sweep: a JSON file for each, and a CSV file for all."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lightning_memo.cli.sweeps.job_settings import setting_values
from lightning_memo.utils.files import replacing

ESTIMATE_FILE: Final = "estimate.json"


@dataclass(frozen=True, kw_only=True)
class JobEstimate:
    """Settings and estimate of one job."""

    overrides: Sequence[str]
    """Overrides of the command line, as ``name=value``."""

    longest: bool
    """Whether the job searched for the longest sequence."""

    answer: dict[str, Any] | None = None
    """The estimate as from `Estimate.to_dict`, or None after an error."""

    device_budget_bytes: int | None = None
    """Usable device memory."""

    message: str = ""
    """The error in one line, if there was one."""

    def save(self, folder: Path) -> None:
        """Writes the estimate into the folder of the job."""
        with replacing(folder / ESTIMATE_FILE) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> JobEstimate:
        """Reads what `save` wrote.

        Raises:
            OSError: The folder contains no estimate.
        """
        return cls(**json.loads((folder / ESTIMATE_FILE).read_text(encoding="utf-8")))

    def label(self, names: Sequence[str]) -> str:
        """Returns the values of settings as text for a legend."""
        values = zip(names, setting_values(self, names), strict=True)
        return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in values)


def load_estimates(folder: Path) -> list[JobEstimate]:
    """Returns the estimates of all jobs in a sweep's folder, in the order of the jobs' numbers."""
    jobs = sorted((path.parent for path in folder.glob(f"*/{ESTIMATE_FILE}")), key=lambda job: int(job.name))
    return [JobEstimate.load(job) for job in jobs]


def write_csv(jobs: Sequence[JobEstimate], path: Path) -> None:
    """Writes a CSV file with one row for each job: its overrides, its estimate and its error.

    Args:
        jobs: Jobs of the sweep.
        path: CSV file to write. Its folder is created if it does not exist.

    Raises:
        OSError: The file cannot be written.
    """
    rows = [{"overrides": " ".join(job.overrides), **_flat(job.answer or {}), "message": job.message} for job in jobs]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "message"]
    # Columns of one group are adjacent with the total last, although methods have different categories of memory.
    groups = list(dict.fromkeys(name.partition(".")[0] for name in names))
    columns = sorted(names, key=lambda name: (groups.index(name.partition(".")[0]), name.endswith(".total")))
    with replacing(path) as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, "message"], restval="")
        writer.writeheader()
        writer.writerows(rows)


def _flat(answer: dict[str, Any]) -> dict[str, Any]:
    """Flattens nested values to names such as `parallel.tp`, and joins sentences."""
    flat: dict[str, Any] = {}
    for name, value in answer.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": item for key, item in _flat(value).items()})
        else:
            flat[name] = " ".join(value) if isinstance(value, list) else value
    return flat
