"""Divides loaders of iterable datasets over data-parallel ranks, and checks that ranks get batches that fit each other.

Lightning divides map-style datasets by a distributed sampler and does not divide iterable datasets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_memo.parallel.batches.divide_batch import token_tensor
from lightning_memo.parallel.ranks import Ranks


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
        if self._group is not None and not _same_on_all(batch, self._group):
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


def check_even(loop: str, batches: float, ranks: Ranks) -> None:
    """Checks that all ranks run a loop on equally many batches. This is a collective.

    Args:
        loop: Name of the loop, for the message.
        batches: Number of this rank's batches; infinite if it is not known.
        ranks: The ranks.

    Raises:
        ValueError: They do not. It is raised on all ranks.
    """
    counts = ranks.gather(batches)
    if len(set(counts)) > 1:
        raise ValueError(
            f"{loop}: processes have {min(counts)} to {max(counts)} batches, and each waits for the others: give a "
            f"number of samples that the data-parallel size divides, or {loop} in one process"
        )


def check_same_batch(batch: Any, group: dist.ProcessGroup, data_rank: int) -> None:
    """Checks that the ranks that share a batch got the same one. This is a collective of `group`.

    Args:
        batch: Batch from this rank's loader.
        group: Context-parallel and tensor-parallel ranks of one data-parallel rank.
        data_rank: Data-parallel rank of the group.

    Raises:
        ValueError: The batches differ. It is raised on all ranks of the group.
    """
    if not _same_on_all(batch, group):
        raise ValueError(
            f"the {dist.get_world_size(group)} processes of data-parallel rank {data_rank} got different batches, but "
            "they share one: shuffle with a seeded sampler (seed_everything), and let a dataset that divides its data "
            "by itself do so by trainer.strategy.data_parallel_rank, not by global rank"
        )


def check_same_size(batch: Any, group: dist.ProcessGroup, experts: int) -> None:
    """Checks that the ranks that send each other tokens got batches of one size. This is a collective of `group`.

    Layers would otherwise run in other slices on some of them, and exchange tokens more or less often.

    Args:
        batch: Batch from this rank's loader.
        group: The ranks that share experts.
        experts: Expert-parallel size.

    Raises:
        ValueError: The sizes differ. It is raised on all ranks of the group.
    """
    sizes = _of_all(_fingerprint(batch)[:-1], group)
    if not bool((sizes == sizes[0]).all()):
        given = ", ".join(sorted({" x ".join(map(str, size[1 : 1 + size[0]])) for size in sizes.tolist()}))
        raise ValueError(
            f"expert_parallel_size={experts}: processes that share experts got batches of {given} tokens, and need "
            "equal sizes: pack or pad rows to one length, or let context-parallel processes alone share experts"
        )


def check_same_images(batch: Any, group: dist.ProcessGroup) -> None:
    """Checks that all ranks train the tower of a model, or none. This is a collective of `group`.

    Args:
        batch: Batch from this rank's loader.
        group: Data-parallel ranks.

    Raises:
        ValueError: Some ranks got images, and others did not. It is raised on all ranks of the group.
    """
    names = batch if isinstance(batch, Mapping) else {}
    has_images = any(name.startswith("pixel_values") and names[name] is not None for name in names)
    if len(_of_all(torch.tensor([has_images]), group).unique()) > 1:
        raise ValueError(
            "some data-parallel processes got a batch with images and others one without, and would reduce other "
            "gradients: sort batches by kind, freeze what processes images, or set data_parallel_size=1"
        )


def _same_on_all(batch: Any, group: dist.ProcessGroup) -> bool:
    """Whether all ranks of `group` have the same tokens. Uses one all-gather of a few integers, whatever the shapes."""
    prints = _of_all(_fingerprint(batch), group)
    return bool((prints == prints[0]).all())


def _of_all(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the tensors of all ranks of a group, `[ranks, ...]`."""
    # NCCL sends CUDA tensors only, and batches may still be on the host.
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else "cpu"
    mine = mine.to(device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    return torch.stack(everyones)


def _fingerprint(batch: Any) -> Tensor:
    """Returns dimensions and checksum of a batch's tokens, or of its first tensor; int64 `[5]`."""
    tensor = _first_tensor(batch)
    if tensor is None:
        return torch.zeros(5, dtype=torch.int64)
    sizes = torch.tensor([tensor.ndim, *(*tensor.shape, 0, 0, 0)[:3]], device=tensor.device)
    if tensor.is_floating_point():  # embeddings are too large for a weighted copy
        checksum = tensor.sum(dtype=torch.float64).view(torch.int64)
    else:
        checksum = (tensor.flatten().long() * torch.arange(1, tensor.numel() + 1, device=tensor.device)).sum()
    return torch.cat([sizes, checksum[None]])


def _first_tensor(batch: Any) -> Tensor | None:
    tokens = batch if isinstance(batch, Tensor) else token_tensor(batch)
    if tokens is not None:
        return tokens
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((tensor for part in parts if (tensor := _first_tensor(part)) is not None), None)
