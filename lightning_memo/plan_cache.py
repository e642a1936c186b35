"""Placements of earlier runs, so that the same run need not record and solve again."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_memo.plan import Plan, StepPlacement


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/lightning_memo/plans`, in `~/.cache` if that is not set."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "lightning_memo" / "plans"


@dataclass(frozen=True)
class PlanCache:
    """One file for each fingerprint.

    Args:
        warn: Told in one line when a file is ignored or can't be written.
        folder: Where the files are.
    """

    warn: Callable[[str], None]
    folder: Path

    def find(self, plan: Plan, threads: int, optimizers: str) -> StepPlacement | None:
        """The placement of an earlier run that was the same in all that decides over requests; None if there is none.

        Args:
            plan: What this run swaps.
            threads: Threads that compute.
            optimizers: Their names and settings.
        """
        path = self._path(plan, threads, optimizers)
        try:
            found = Plan.load(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            self.warn(f"a cached plan is ignored, and memory is planned anew: {error}")
            return None
        placement = found.placement
        same = found.fingerprint == plan.fingerprint and found.swap == plan.swap
        if not same or placement is None or placement.threads != threads:
            self.warn(f"a cached plan is ignored, and memory is planned anew: {path} was made for another run")
            return None
        return placement

    def store(self, plan: Plan, threads: int, optimizers: str) -> None:
        """Keep the placement of a plan for later runs."""
        try:
            plan.save(self._path(plan, threads, optimizers))
        except OSError as error:
            self.warn(f"the plan can't be kept for later runs: {error}")

    def _path(self, plan: Plan, threads: int, optimizers: str) -> Path:
        key = json.dumps([asdict(plan.fingerprint), asdict(plan.swap), threads, optimizers], sort_keys=True)
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.json"
