"""The placements of earlier runs that are alike in everything that determines the requests of a step."""

from __future__ import annotations

from pathlib import Path

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_memo.artifacts.plan_cache import PlanCache
from lightning_memo.engine import Engine
from lightning_memo.runtime.training_run_protocol import TrainingRun


def cached_placements(folder: Path, run: TrainingRun, engine: Engine) -> PlanCache:
    """The cache of the placements of runs like this one.

    Args:
        folder: Folder of the plans of earlier runs.
        run: The training run.
        engine: The engine of the run.
    """

    def warn(message: str) -> None:
        rank_zero_warn(f"lightning_memo: {message}")

    optimizers = ", ".join(f"{type(o).__name__} {len(o.param_groups)}" for o in run.optimizers)
    place = f"rank {run.rank} of {run.processes}"
    described = f"{optimizers}; accumulate {run.accumulated_batches}; clip {run.gradient_clip}; {place}"
    return PlanCache(
        folder, warn, torch.get_num_threads(), described + ", check_restored" * engine.settings.check_restored
    )
