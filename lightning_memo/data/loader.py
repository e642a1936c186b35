"""An order of batches that depends on nothing but seed and epoch, and that continues where a checkpoint left it."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from lightning_memo.data.tokenizer import Tokens


class ChunkDataset(Dataset[dict[str, Tensor]]):
    """Contiguous pieces of one long sequence, without overlap; what is left at the end is dropped.

    Items are ``{"input_ids": [seq_len], "labels": [seq_len]}``; the model shifts the labels.
    """

    def __init__(self, tokens: Tokens, seq_len: int) -> None:
        self._chunks = tokens[: len(tokens) // seq_len * seq_len].reshape(-1, seq_len)

    def __len__(self) -> int:
        return len(self._chunks)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.from_numpy(self._chunks[index]).long()
        return {"input_ids": ids, "labels": ids.clone()}


class EpochSampler(Sampler[int]):
    """A permutation that seed and epoch determine, from ``start`` on.

    Lightning calls ``set_epoch`` before each epoch.
    """

    def __init__(self, length: int, seed: int) -> None:
        self.length = length
        self.seed = seed
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return self.length

    def set_epoch(self, epoch: int) -> None:
        """Chooses the permutation."""
        self.epoch = epoch

    @override
    def __iter__(self) -> Iterator[int]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.length)
        return iter(order[self.start :].tolist())


class ResumableLoader(DataLoader[dict[str, Tensor]]):
    """A loader whose position within the epoch is saved in Lightning's checkpoints.

    Args:
        dataset: What is loaded.
        batch_size: Items per batch; a last, smaller batch is dropped.
        seed: Determines the order, with the epoch.
        epoch_batches: Batches after which the trainer ends an epoch, where that is fewer than all.
        num_workers: As in :class:`~torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: ChunkDataset,
        batch_size: int,
        seed: int,
        epoch_batches: int | None = None,
        num_workers: int = 0,
    ) -> None:
        self._order = EpochSampler(len(dataset), seed)
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=self._order,
            drop_last=True,
            num_workers=num_workers,
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
        position = self._served if self._served < self._epoch_batches else 0
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
        return {"sequences": len(self._order), "batch_size": self.batch_size, "seed": self._order.seed}


def _settings(values: dict[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())
