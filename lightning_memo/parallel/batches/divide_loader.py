"""Which batches a data-parallel process gets from loaders that have no sampler to divide their data.

Lightning divides map-style datasets by a distributed sampler, and leaves datasets that are streams alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch.utils.data import DataLoader, IterableDataset

from lightning_memo.parallel.batches.divide_batch import same_on_all


def split_iterable(loader: Any, rank: int, count: int, group: dist.ProcessGroup | None = None) -> Any:
    """A loader of which each data-parallel process gets every `count`-th batch, if its dataset is a stream.

    Every process reads the whole stream, which must be the same for all, and keeps its own batches of it.

    Args:
        loader: Any loader; one without an `IterableDataset` is returned as it is.
        rank: Data-parallel rank of this process.
        count: Data-parallel size.
        group: The data-parallel processes, to check that they read the same stream; `None` checks nothing.
    """
    if count == 1 or not (isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)):
        return loader
    seed_workers(loader, 0)  # the stream is the same for all, so its random numbers are, too
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (StatefulSplitLoader if stateful else SplitLoader)(loader, rank, count, group)


def seed_workers(loader: Any, rank: int) -> None:
    """Seeds a loader's workers by `rank` where Lightning would by global rank (`seed_everything(workers=True)`).

    Processes that share a batch must draw the same random numbers for it.
    """
    wanted = int(os.environ.get("PL_SEED_WORKERS", 0))
    if wanted and isinstance(loader, DataLoader) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=rank)


class SplitLoader:
    """Batches `rank`, `rank + count`, ... of a loader, whose attributes it has.

    All processes get the same number of batches: those left over at the end are dropped, as a process without a batch
    would leave the others waiting.
    """

    _own = frozenset({"_loader", "_rank", "_count", "_group"})

    def __init__(self, loader: DataLoader[Any], rank: int, count: int, group: dist.ProcessGroup | None) -> None:
        self._loader = loader
        self._rank = rank
        self._count = count
        self._group = group

    def __iter__(self) -> Iterator[Any]:
        mine = None
        for number, batch in enumerate(self._loader):
            if number == 0:
                self._check_same_stream(batch)
            if number % self._count == self._rank:
                mine = batch
            if number % self._count == self._count - 1:
                yield mine

    def __len__(self) -> int:
        return len(self._loader) // self._count

    def __getattr__(self, name: str) -> Any:
        if name in self._own:  # not there yet, while an object is copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets attributes of loaders, as to end their workers.
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def _check_same_stream(self, batch: Any) -> None:
        if self._group is not None and not same_on_all(batch, self._group):
            raise ValueError(
                f"the dataset {type(self._loader.dataset).__name__} gives data-parallel processes different batches, "
                "but each of them keeps its share of one stream: make the stream the same for all (seed its shuffling),"
                " or, if the dataset divides its data by itself, set Trainer(use_distributed_sampler=False)"
            )


class StatefulSplitLoader(SplitLoader):
    """A :class:`SplitLoader` whose place in the stream Lightning saves: methods, because it looks for them by class."""

    def state_dict(self) -> dict[str, Any]:
        """The loader's state."""
        return self._loader.state_dict()  # type: ignore[attr-defined, no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where the loader's state was saved."""
        self._loader.load_state_dict(state)  # type: ignore[attr-defined]
