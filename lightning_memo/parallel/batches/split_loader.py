"""Loaders of streams of which each data-parallel rank keeps its share of the batches.

Lightning divides map-style datasets by a distributed sampler and does not divide iterable datasets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from lightning_memo.parallel.batches.same_batches import same_on_all


def split_iterable(loader: Any, rank: int, count: int, group: dist.ProcessGroup | None = None) -> Any:
    """Returns a loader of every `count`-th batch if the dataset is a stream.

    Every rank reads the whole stream, which has to be the same on all ranks, and keeps its own batches.

    Args:
        loader: Any loader. It is returned unchanged if its dataset is no `IterableDataset`.
        rank: Data-parallel rank of this process.
        count: Data-parallel size.
        group: Process group of the data-parallel ranks, which compare their first batches; `None` skips this check.
    """
    if count == 1 or not _is_stream(loader):
        return loader
    stateful = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
    return (StatefulSplitLoader if stateful else SplitLoader)(loader, rank, count, group)


def seeding_rank(loader: Any, rank: int, count: int) -> int:
    """Returns the rank that seeds a loader's workers: 0 for a stream that is split, because all ranks read it whole.

    Args:
        loader: Loader before :func:`split_iterable`.
        rank: Data-parallel rank of this process.
        count: Data-parallel size by which the loader is split; 1 if it is not split.
    """
    return 0 if count > 1 and _is_stream(loader) else rank


def _is_stream(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)


class SplitLoader:
    """Batches `rank`, `rank + count`, ... of a loader. Other attributes are those of the loader.

    All ranks get the same number of batches. Remaining batches at the end are dropped, because a rank without a batch
    would let the others wait forever.

    Args:
        loader: Loader of an iterable dataset.
        rank: Data-parallel rank of this process.
        count: Data-parallel size.
        group: As for :func:`split_iterable`.
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
        if name in self._own:  # missing while the object is copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # Lightning sets attributes of loaders, for example to end their workers.
        if name in self._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def _check_same_stream(self, batch: Any) -> None:
        if self._group is not None and not same_on_all(batch, self._group):
            raise ValueError(
                f"the dataset {type(self._loader.dataset).__name__} gives data-parallel processes different batches, "
                "but each process keeps its share of one stream: give all processes the same stream (seed its "
                "shuffling), or set Trainer(use_distributed_sampler=False) if the dataset divides its data itself"
            )


class StatefulSplitLoader(SplitLoader):
    """A :class:`SplitLoader` whose state Lightning saves. Lightning looks for these methods in the class."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the inner loader."""
        return self._loader.state_dict()  # type: ignore[attr-defined, no-any-return]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of the inner loader."""
        self._loader.load_state_dict(state)  # type: ignore[attr-defined]
