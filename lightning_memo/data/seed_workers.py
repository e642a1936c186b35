"""Random seeds of data loader workers."""

import os
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader


def seed_workers(loader: DataLoader[Any], rank: int) -> None:
    """Seed a loader's workers by `rank`, where Lightning would use the global rank.

    Lightning seeds workers after `seed_everything(workers=True)`. A `worker_init_fn` of the loader is kept.

    Args:
        loader: Loader whose workers are seeded.
        rank: Rank that is part of the seed. Processes that share a batch need the same one.
    """
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)
