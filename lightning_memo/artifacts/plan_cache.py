"""Placements of earlier runs, so that the same run need not record and solve again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from lightning_memo.artifacts.buffer_placement import StepPlacement
from lightning_memo.artifacts.plan import Plan
from lightning_memo.artifacts.trace import Trace
from lightning_memo.utils.files import user_cache

_WRITING_SECONDS = 3600.0  # a file that is not finished after an hour is of a process that was killed


def cache_folder() -> Path:
    """Where plans of earlier runs are."""
    return user_cache("plans")


@dataclass(frozen=True)
class PlanCache:
    """Two files for each kind of run: the plan, and the trace that it was made from."""

    folder: Path
    warn: Callable[[str], None]
    """Told in one line when a file is ignored or can't be written."""

    threads: int
    """Threads that compute."""

    optimizers: str
    """What else decides over the requests: names and settings of the optimizers."""

    limit_bytes: int = 256 * 2**20
    """Of all files; those whose last use is longest ago go first. A plan of a large model has some megabytes."""

    def find(self, plan: Plan) -> tuple[StepPlacement, Trace] | None:
        """What an earlier run found that was the same in all that decides over requests; None if there was none."""
        path = self._path(plan)
        try:
            found, trace = Plan.load(path), Trace.load(path.with_suffix(".csv"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, OverflowError) as error:
            self.warn(f"a cached plan is ignored, and memory is planned anew: {error}")
            return None
        placement = found.placement
        same = found.fingerprint == plan.fingerprint and found.swap.executed == plan.swap.executed
        if not same or placement is None or placement.threads != self.threads or not _made_from(placement, trace):
            self.warn(f"a cached plan is ignored, and memory is planned anew: {path} was made for another run")
            return None
        with contextlib.suppress(OSError):  # removed meanwhile, or another user's
            os.utime(path)
        return placement, trace

    def store(self, plan: Plan, trace: Trace) -> None:
        """Keep a plan with its placement for later runs."""
        path = self._path(plan)
        try:
            trace.save(path.with_suffix(".csv"))
            plan.save(path)
            self._make_room(path.stem)
        except OSError as error:
            self.warn(f"the plan can't be kept for later runs: {error}")

    def _make_room(self, newest: str) -> None:
        """Remove what was not used for longest, and what killed processes left; others may read, write and remove."""
        files: dict[str, list[tuple[float, int, Path]]] = {}
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                if path.name.startswith(".") and status.st_mtime > time.time() - _WRITING_SECONDS:
                    continue
                files.setdefault(path.stem, []).append((status.st_mtime, status.st_size, path))
        total = sum(size for kept in files.values() for _, size, _ in kept)
        for stem in sorted(files, key=lambda stem: max(used for used, _, _ in files[stem])):
            if total <= self.limit_bytes or stem == newest:
                return
            for _, size, path in sorted(files[stem], key=lambda file: file[2].suffix, reverse=True):
                path.unlink(missing_ok=True)
                total -= size

    def _path(self, plan: Plan) -> Path:
        key = [asdict(plan.fingerprint), asdict(plan.swap.executed), self.threads, self.optimizers]
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:24]}.json"


def _made_from(placement: StepPlacement, trace: Trace) -> bool:
    """Whether a placement has just the requests of a trace: its file may be of another run that ended half-way."""
    phases = zip(trace.phases, trace.phase_start[:-1], trace.phase_start[1:], strict=True)
    sizes = {name: trace.size[start:end][trace.lane[start:end] == 0].tolist() for name, start, end in phases}
    return sizes == {phase.name: list(phase.sizes) for phase in placement.phases}
