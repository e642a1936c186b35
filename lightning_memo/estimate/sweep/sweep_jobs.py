"""What a job of a sweep leaves behind, and the table over all of them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from lightning_memo.utils.files import replacing

FILE_NAME: Final = "estimate.json"


@dataclass(frozen=True, kw_only=True)
class SweptEstimate:
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
        with replacing(folder / FILE_NAME) as unfinished:
            unfinished.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> SweptEstimate:
        """Reads what `save` wrote.

        Raises:
            OSError: There is none in the folder.
        """
        return cls(**json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))

    def setting(self, name: str) -> str:
        """What the command line gave for a setting; "-" where it did not."""
        return dict(override.split("=", 1) for override in self.overrides).get(name, "-")

    def label(self, names: Sequence[str]) -> str:
        """The values of settings, for a legend."""
        return ", ".join(f"{name.rpartition('.')[2]}={self.setting(name)}" for name in names)


def load_jobs(folder: Path) -> list[SweptEstimate]:
    """Returns what the jobs of a sweep left, in the order of their numbers."""
    jobs = sorted((path.parent for path in folder.glob(f"*/{FILE_NAME}")), key=lambda job: int(job.name))
    return [SweptEstimate.load(job) for job in jobs]


def swept_settings(jobs: Sequence[SweptEstimate]) -> list[str]:
    """Returns the names of the settings that differ between the jobs."""
    names = dict.fromkeys(override.split("=", 1)[0] for job in jobs for override in job.overrides)
    return [name for name in names if len({job.setting(name) for job in jobs}) > 1]


def write_csv(jobs: Sequence[SweptEstimate], path: Path) -> None:
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
