"""Checks that processes which wait for each other got batches with which they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memo.parallel.batches.shard_batch import first_tensor
from lightning_memo.parallel.ranks import Ranks


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
    if not same_on_all(batch, group):
        raise ValueError(
            f"the {dist.get_world_size(group)} processes of data-parallel rank {data_rank} got different batches, but "
            "they share one: shuffle with a seeded sampler (seed_everything), and let a dataset that divides its data "
            "by itself do so by data_parallel_rank of trainer.strategy (or of MemoLoop), not by global rank"
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
            "gradients: sort batches by kind, freeze what processes images, or start one process for each sequence"
        )


def same_on_all(batch: Any, group: dist.ProcessGroup) -> bool:
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
    tensor = first_tensor(batch)
    if tensor is None:
        return torch.zeros(5, dtype=torch.int64)
    sizes = torch.tensor([tensor.ndim, *(*tensor.shape, 0, 0, 0)[:3]], device=tensor.device)
    if tensor.is_floating_point():  # embeddings are too large for a weighted copy
        checksum = tensor.sum(dtype=torch.float64).view(torch.int64)
    else:
        checksum = (tensor.flatten().long() * torch.arange(1, tensor.numel() + 1, device=tensor.device)).sum()
    return torch.cat([sizes, checksum[None]])
