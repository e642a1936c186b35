"""Memory plans of earlier runs, so that an equal run does not have to record and solve again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.trace import Trace
from lightning_memo.utils.files import user_cache


def cache_folder() -> Path:
    """Folder of the plans of earlier runs."""
    return user_cache("plans")


@dataclass(frozen=True)
class PlanCache:
    """A folder with two files for each run configuration: the plan, and the trace that it was made from."""

    folder: Path
    warn: Callable[[str], None]
    """Called with one line when a file is ignored or cannot be written."""

    threads: int
    """Number of CPU threads that compute."""

    optimizers: str
    """Names and settings of the optimizers, on which the memory requests depend, too."""

    limit_bytes: int = 256 * 2**20
    """Maximum size of all files. The least recently used ones are removed first. A plan has a few megabytes."""

    def find(self, plan: Plan) -> tuple[StepPlacement, Trace] | None:
        """Look up the placement and the trace of an earlier run with the same memory requests.

        Args:
            plan: Plan of this run.

        Returns:
            The placement and the trace; None if there is no such run, or its files cannot be used.
        """
        path = self._path(plan)
        try:
            found, trace = Plan.load(path), Trace.load(path.with_suffix(".csv"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, OverflowError) as error:
            self.warn(f"ignoring the cached memory plan and planning memory again: {error}")
            return None
        placement = found.placement
        same = found.fingerprint == plan.fingerprint and found.swap == plan.swap
        if not same or placement is None or placement.threads != self.threads or not _made_from(placement, trace):
            self.warn(f"ignoring the cached memory plan and planning memory again: {path} belongs to another run")
            return None
        with contextlib.suppress(OSError):  # the file was removed meanwhile, or belongs to another user
            os.utime(path)
        return placement, trace

    def store(self, plan: Plan, trace: Trace) -> None:
        """Save a plan with its placement, and its trace, for later runs."""
        path = self._path(plan)
        try:
            trace.save(path.with_suffix(".csv"))
            plan.save(path)
            self._make_room(path.stem)
        except OSError as error:
            self.warn(f"the memory plan cannot be saved for later runs: {error}")

    def _make_room(self, newest: str) -> None:
        """Remove the least recently used files. Other processes may change the folder meanwhile."""
        files: dict[str, list[tuple[float, int, Path]]] = {}
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.name.startswith("."):  # what other processes are writing
                    continue
                status = path.stat()
                files.setdefault(path.stem, []).append((status.st_mtime, status.st_size, path))
        total = sum(size for versions in files.values() for _, size, _ in versions)
        for stem in sorted(files, key=lambda stem: max(used for used, _, _ in files[stem])):
            if total <= self.limit_bytes or stem == newest:
                return
            for _, size, path in sorted(files[stem], key=lambda file: file[2].suffix, reverse=True):
                path.unlink(missing_ok=True)
                total -= size

    def _path(self, plan: Plan) -> Path:
        key = [asdict(plan.fingerprint), asdict(plan.swap), self.threads, self.optimizers]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:24]}.json"


def _made_from(placement: StepPlacement, trace: Trace) -> bool:
    """Whether a placement has exactly the requests of a trace, which an interrupted run may have replaced."""
    phases = zip(trace.phases, trace.phase_start[:-1], trace.phase_start[1:], strict=True)
    sizes = {name: trace.size[start:end][trace.lane[start:end] == 0].tolist() for name, start, end in phases}
    return sizes == {phase.name: list(phase.sizes) for phase in placement.phases}
