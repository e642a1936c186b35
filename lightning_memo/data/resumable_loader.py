"""An order of batches that depends on nothing but seed and epoch, and that continues where a checkpoint left it."""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from typing_extensions import override

from lightning_memo.data.tokenizer import Tokens
from lightning_memo.utils.parent_process import exit_with_parent


class SequenceDataset(Dataset[dict[str, Tensor]]):
    """Sequences of one length, by number.

    Attributes:
        tokens: Of the text that they are made of.
    """

    tokens: int

    @abstractmethod
    def __len__(self) -> int: ...


class ChunkDataset(SequenceDataset):
    """Contiguous pieces of one long sequence, without overlap; what is left at the end is dropped.

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
    """The part of one data-parallel process of a permutation that seed and epoch determine, from ``start`` on.

    The n-th entries of all parts lie side by side in the permutation, so that what is trained on together does not
    depend on the number of processes. Lightning calls ``set_epoch`` before each epoch; where there are several
    processes, it would replace any sampler but a ``DistributedSampler``.

    Args:
        length: Number of items.
        seed: Determines the permutation, with the epoch.
        rank: Data-parallel rank of this process.
        count: Data-parallel size. All parts are as long: items left over are dropped.
    """

    def __init__(self, length: int, seed: int, rank: int = 0, count: int = 1) -> None:
        super().__init__(range(length), num_replicas=count, rank=rank, seed=seed, drop_last=True)  # type: ignore[arg-type]
        self.length = length
        self.start = 0

    @override
    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.length)
        part = order[self.rank : self.total_size : self.num_replicas]
        return iter(part[self.start :].tolist())


def end_with_parent(worker: int) -> None:
    """Lets a worker of a loader end with the process that loads, however that ends; a `worker_init_fn`.

    PyTorch's workers look for their parent every five seconds, between batches. One whose batch nobody takes any more
    never comes to that, and one of a fork server has that server as its parent.

    Args:
        worker: Its number.
    """
    exit_with_parent()


class ResumableLoader(DataLoader[dict[str, Tensor]]):
    """A loader whose position within the epoch is saved in Lightning's checkpoints.

    The position is the same for all data-parallel processes. Resuming with another number of them needs the same
    product of that number and ``batch_size``.

    Args:
        dataset: What is loaded.
        batch_size: Items per batch; a last, smaller batch is dropped.
        seed: Determines the order, with the epoch.
        epoch_batches: Batches after which the trainer ends an epoch, where that is fewer than all.
        num_workers: As in `torch.utils.data.DataLoader`.
        rank: Data-parallel rank of this process.
        count: Data-parallel size; each process gets its own batches.
        unfinished: Tells how many of the batches that were served are not over: a checkpoint has them served again.
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
        unfinished: Callable[[], int] = lambda: 0,
    ) -> None:
        self._unfinished = unfinished
        self._order = EpochSampler(len(dataset), seed, rank, count)
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=self._order,
            drop_last=True,
            num_workers=num_workers,
            worker_init_fn=end_with_parent,
            # Its own generator: starting an iterator must not change the random numbers that the model sees.
            generator=torch.Generator().manual_seed(seed),
        )
        self._epoch_batches = len(self) if epoch_batches is None else min(epoch_batches, len(self))
        self._start = 0
        self._served = 0

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # A generator: all of this happens at the first next(), after Lightning has told the sampler the epoch.
        assert self.batch_size is not None
        start, self._start = self._start, 0
        self._order.start = start * self.batch_size
        for self._served, batch in enumerate(super().__iter__(), start + 1):
            yield batch

    def state_dict(self) -> dict[str, int]:
        """Returns the position, and what it must be read with. After the last batch it is the next epoch's first."""
        position = self._served - self._unfinished()
        position = position if position < self._epoch_batches else 0
        return {"position": position, **self._identity()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues at a saved position.

        Raises:
            ValueError: The checkpoint was written with other data, batch size or seed.
        """
        saved = {name: state[name] for name in self._identity()}
        if saved != self._identity():
            raise ValueError(
                f"ckpt_path: the checkpoint's data order was {_settings(saved)}, now it is"
                f" {_settings(self._identity())}; resume with the same data settings, or start anew from its weights"
            )
        self._start = self._served = state["position"]

    def _identity(self) -> dict[str, int]:
        assert self.batch_size is not None
        batch_size = self.batch_size * self._order.num_replicas
        return {"sequences": self._order.length, "batch_size": batch_size, "seed": self._order.seed}


def _settings(values: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
