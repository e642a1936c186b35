"""What a job of a sweep leaves behind, and the table over all of them."""

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
    """The settings of one job, and its answer."""

    overrides: Sequence[str]
    """What the command line gave, as ``name=value``."""

    longest: bool
    """Whether the longest length was asked for."""

    answer: dict[str, Any] | None = None
    """As `Estimate.to_dict`; None where there was a mistake."""

    device_room_bytes: int | None = None
    message: str = ""
    """The mistake, in one line."""

    def save(self, folder: Path) -> None:
        """Writes it into a job's folder."""
        with replacing(folder / ESTIMATE_FILE) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> JobEstimate:
        """Reads what `save` wrote.

        Raises:
            OSError: There is none in the folder.
        """
        return cls(**json.loads((folder / ESTIMATE_FILE).read_text(encoding="utf-8")))

    def label(self, names: Sequence[str]) -> str:
        """The values of settings, for a legend."""
        values = zip(names, setting_values(self, names), strict=True)
        return ", ".join(f"{name.rpartition('.')[2]}={value}" for name, value in values)


def load_estimates(folder: Path) -> list[JobEstimate]:
    """Returns what the jobs of a sweep left, in the order of their numbers."""
    jobs = sorted((path.parent for path in folder.glob(f"*/{ESTIMATE_FILE}")), key=lambda job: int(job.name))
    return [JobEstimate.load(job) for job in jobs]


def write_csv(jobs: Sequence[JobEstimate], path: Path) -> None:
    """Writes one row for each job: its overrides, all of its answer, and its mistake.

    Args:
        jobs: of the sweep.
        path: the file; its folder is made if missing.

    Raises:
        OSError: it can't be written.
    """
    rows = [{"overrides": " ".join(job.overrides), **_flat(job.answer or {}), "message": job.message} for job in jobs]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "message"]
    # All columns of one group stand together, its total last, though not every method has the same kinds of bytes.
    groups = list(dict.fromkeys(name.partition(".")[0] for name in names))
    columns = sorted(names, key=lambda name: (groups.index(name.partition(".")[0]), name.endswith(".total")))
    with replacing(path) as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*columns, "message"], restval="")
        writer.writeheader()
        writer.writerows(rows)


def _flat(answer: dict[str, Any]) -> dict[str, Any]:
    """One level: `parallel.tp`, `device_bytes.total`; sentences joined."""
    flat: dict[str, Any] = {}
    for name, value in answer.items():
        if isinstance(value, dict):
            flat.update({f"{name}.{key}": item for key, item in value.items()})
        else:
            flat[name] = " ".join(value) if isinstance(value, list) else value
    return flat
