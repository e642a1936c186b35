"""Data loaders whose batch order depends only on seed and epoch, which resume from a checkpoint, and their workers."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from lightning_memo.data.tokenizer import Tokens
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


_WINDOW = 64  # batches whose rows are exchanged: larger ones are more even, and less random


class SequenceDataset(Dataset[dict[str, Tensor]]):
    """Map-style dataset of sequences of one length.

    Attributes:
        tokens: Number of tokens in the text.
        costs: Relative cost of each sequence's attention; `None` if all cost the same.
    """

    tokens: int
    costs: npt.NDArray[np.float64] | None = None

    @abstractmethod
    def __len__(self) -> int: ...


class ChunkDataset(SequenceDataset):
    """Contiguous pieces of one long sequence, without overlap. The incomplete last piece is dropped.

    Items are ``{"input_ids": [seq_len], "labels": [seq_len]}``; the model shifts the labels.
    """

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self.tokens = len(tokens)
        self._chunks = tokens[: len(tokens) // seq_len * seq_len].reshape(-1, seq_len)

    @override
    def __len__(self) -> int:
        return len(self._chunks)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self._chunks[index]).long()
        return {"input_ids": ids, "labels": ids.clone()}


class EpochSampler(DistributedSampler[int]):
    """One data-parallel rank's part of a permutation given by seed and epoch, from index ``start`` on.

    The n-th entries of all parts are adjacent in the permutation, so that the samples of a global batch do not depend
    on the number of processes. Lightning calls ``set_epoch`` before each epoch. With several processes it would replace
    any sampler that is not a ``DistributedSampler``.

    Args:
        length: Number of items.
        seed: Seed of the permutation, together with the epoch.
        rank: Data-parallel rank of this process.
        count: Data-parallel size. All parts have the same length, and remaining items are dropped.
        costs: Cost of each item, to balance batches; `None` balances nothing.
        batch_size: Number of items in a batch of one rank.
    """

    def __init__(
        self,
        length: int,
        seed: int,
        rank: int = 0,
        count: int = 1,
        costs: npt.NDArray[Any] | None = None,
        batch_size: int = 1,
    ) -> None:
        super().__init__(range(length), num_replicas=count, rank=rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
        self.length = length
        self.costs = costs
        self.start = 0
        self._batch_size = batch_size * count

    @override
    def __iter__(self) -> Iterator[int]:
        random = np.random.default_rng((self.seed, self.epoch))
        if self.costs is None:
            order = random.permutation(self.length)
        else:
            order = balanced_order(self.costs, self._batch_size, random)
        part = order[self.rank : self.total_size : self.num_replicas]
        return iter(part[self.start :].tolist())


class ResumableLoader(DataLoader[dict[str, Tensor]]):
    """Data loader whose position within the epoch is saved in Lightning's checkpoints.

    The position is the same for all data-parallel ranks. A run can resume with another data-parallel size if its
    product with ``batch_size`` is the same.

    Args:
        dataset: Dataset to load.
        batch_size: Number of items per batch. An incomplete last batch is dropped.
        seed: Seed of the order, together with the epoch.
        epoch_batches: Number of batches after which the trainer ends an epoch, if fewer than all.
        num_workers: As in `torch.utils.data.DataLoader`.
        rank: Data-parallel rank of this process.
        count: Data-parallel size. Each rank gets its own batches.
        balance: Whether the items of a global batch cost about the same; see :func:`balanced_order`.
        unfinished: Returns how many of the returned batches are not finished. A checkpoint repeats them.
    """

    def __init__(
        self,
        dataset: SequenceDataset,
        batch_size: int,
        seed: int,
        epoch_batches: int | None = None,
        num_workers: int = 0,
        rank: int = 0,
        count: int = 1,
        balance: bool = True,
        unfinished: Callable[[], int] = lambda: 0,
    ) -> None:
        self._unfinished = unfinished
        costs = dataset.costs if balance else None
        self._order = EpochSampler(len(dataset), seed, rank, count, costs, batch_size)
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=self._order,
            drop_last=True,
            num_workers=num_workers,
            worker_init_fn=end_with_parent,
            # A generator of its own: creating an iterator must not change the random numbers of the model.
            generator=torch.Generator().manual_seed(seed),
        )
        self._epoch_batches = len(self) if epoch_batches is None else min(epoch_batches, len(self))
        self._start = 0
        self._served = 0

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator, so that this runs at the first next(), after Lightning has set the epoch of the sampler.
        assert self.batch_size is not None
        start, self._start = self._start, 0
        self._order.start = start * self.batch_size
        for self._served, batch in enumerate(super().__iter__(), start + 1):
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and its settings. After the last batch it is the start of the next epoch."""
        position = self._served - self._unfinished()
        position = position if position < self._epoch_batches else 0
        return {"position": position, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved position.

        Raises:
            ValueError: The checkpoint was written with other data, batch size or seed.
        """
        saved = {name: state.get(name) for name in self._identity()}
        if saved != self._identity():
            raise ValueError(
                f"ckpt_path: the checkpoint's data order was {_settings(saved)}, now it is"
                f" {_settings(self._identity())}; resume with the same data settings, or start anew from its weights"
            )
        self._start = self._served = state["position"]

    def _identity(self) -> dict[str, Any]:
        assert self.batch_size is not None
        batch_size = self.batch_size * self._order.num_replicas
        sizes = {"sequences": self._order.length, "batch_size": batch_size}
        return {**sizes, "seed": self._order.seed, "balance": self._order.costs is not None}


def balanced_order(costs: npt.NDArray[Any], batch_size: int, random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Returns a random order of rows, in which the rows of a batch cost about the same.

    Rows are shuffled and divided into windows. In each window, rows of neighbouring costs make up a batch, and the
    batches are shuffled. So the slowest process of a step waits for no other, and steps of all costs alternate.

    Args:
        costs: Cost of each row.
        batch_size: Number of rows in a batch of all processes. An incomplete last batch is at the end.
        random: Source of the order.
    """
    shuffled = random.permutation(len(costs))
    whole = len(costs) // batch_size * batch_size
    parts = []
    for start in range(0, whole, _WINDOW * batch_size):
        window = shuffled[start : min(start + _WINDOW * batch_size, whole)]
        by_cost = window[np.argsort(costs[window], kind="stable")]
        parts.append(random.permutation(by_cost.reshape(-1, batch_size)).ravel())
    return np.concatenate([*parts, shuffled[whole:]])


def _settings(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
