"""Worker processes of data loaders: their random seeds, the signals that they get, and their end with the parent."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader

from lightning_memo.utils.process import exit_with_parent


def seed_workers(loader: DataLoader[Any], rank: int) -> None:
    """Seed a loader's workers by `rank`, where Lightning would use the global rank.

    Lightning seeds workers after `seed_everything(workers=True)`. A `worker_init_fn` of the loader is kept.

    Args:
        loader: Loader whose workers are seeded.
        rank: Rank that is part of the seed. Processes that share a batch need the same one.
    """
    if int(os.environ.get("PL_SEED_WORKERS", 0)) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)


def shield_workers(loader: DataLoader[Any]) -> None:
    """Put each worker of a loader into a process group of its own. A `worker_init_fn` of the loader is kept.

    torchrun sends SIGTERM to the process group of each rank. A rank whose workers have ended cannot end its step.
    """
    init = loader.worker_init_fn
    if loader.num_workers and not (isinstance(init, partial) and init.func is _leave_group):
        loader.worker_init_fn = partial(_leave_group, init)


def _leave_group(init: Callable[[int], None] | None, worker: int) -> None:
    os.setpgid(0, 0)
    if init is not None:
        init(worker)


def end_with_parent(worker: int) -> None:
    """Makes a loader's worker exit when the loading process ends for any reason; a `worker_init_fn`.

    PyTorch's workers check for their parent every five seconds, between batches. A worker whose batch is never taken
    does not reach that check, and the parent of a worker started by a fork server is the fork server.

    Args:
        worker: Number of the worker.
    """
    exit_with_parent()
