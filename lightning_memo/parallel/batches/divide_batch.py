"""Divides a batch over ranks so that the losses of the parts add up to the loss of the whole batch.

All ranks of one data-parallel group read the same batch. Each keeps its own positions, in the order of the model's
input; see :class:`~lightning_memo.parallel.batches.token_layout.TokenLayout`. Labels are shifted before the batch is
divided, because the label of a part's last token is a token of another rank.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_memo.parallel.batches.positions import (
    held,
    largest_position,
    packed_documents,
    right_padded_lengths,
)
from lightning_memo.parallel.batches.shifted_labels import ShiftedLabels
from lightning_memo.parallel.batches.token_layout import TokenLayout, multiple

IGNORED = -100
"""Label of a token that the loss ignores."""

Batch = MutableMapping[str, Any]


def one_slice(batch: int, shard_tokens: int) -> tuple[int, ...]:
    """Returns no slice bounds, for an engine that runs each layer on all tokens at once."""
    return ()


@dataclass(frozen=True, slots=True)
class BatchSharder:
    """Selects the part of a batch that one rank computes.

    Attributes:
        ring: Number of ranks in a ring.
        ring_rank: Rank in the ring.
        ulysses: Number of ranks that exchange heads and tokens all-to-all.
        ulysses_rank: Rank in the all-to-all group.
        shards: Number of sequence-parallel shards: the tensor-parallel size with sequence parallelism, otherwise 1.
        ranks: Data-parallel size times context-parallel size, the number of ranks over which losses are averaged.
        data_group: Data-parallel group of this context-parallel and tensor-parallel rank; `None` if its size is 1.
        takes_loss_arguments: Whether the model's loss takes `shift_labels` and `num_items_in_batch`.
        why_loss_unfit: Why it does not, as a clause, if its loss function is the user's.
        bounds_of: Returns the engine's slice bounds on one shard from the batch rows and the tokens of a shard.
        slices_outside: As `outside` of the layout.
        contiguous: As `contiguous` of the layout.
        documents_of: Returns the positions at which packed documents start in each row, from a batch and its rows.
        in_model: Whether the model divides its tokens itself; see Note: [Where tokens are divided] in `text_model.py`.
    """

    ring: int = 1
    ring_rank: int = 0
    ulysses: int = 1
    ulysses_rank: int = 0
    shards: int = 1
    ranks: int = 1
    data_group: dist.ProcessGroup | None = None
    takes_loss_arguments: bool = False
    why_loss_unfit: str = ""
    bounds_of: Callable[[int, int], tuple[int, ...]] = one_slice
    slices_outside: bool = False
    contiguous: bool = False
    documents_of: Callable[[Batch, int], tuple[tuple[int, ...], ...] | None] = packed_documents
    in_model: bool = False

    @property
    def cuts(self) -> bool:
        """Whether this rank gets other tokens than the loader returns, or another order of them."""
        return self.ring * self.ulysses * self.shards > 1

    def shard(self, batch: Any) -> tuple[Any, TokenLayout | None]:
        """Returns the part of a batch that this rank computes and the layout of its tokens.

        `input_ids` `[batch, tokens]` (or `inputs_embeds`) and every other tensor `[batch, tokens, ...]` are padded on
        the right and divided. `attention_mask` becomes the layout's lengths, missing `position_ids` are added, and
        documents packed in a row become the layout's documents. Other entries are unchanged. A batch that need not be
        divided is unchanged except for the loss arguments, and has no layout.

        Loss arguments are added for models that compute their loss as Hugging Face does, and to batches with
        `shift_labels`. `labels` and `shift_labels` hold the shifted labels of this part. `num_items_in_batch` is the
        number of labels over all data-parallel ranks divided by `ranks`. The loss of a rank, the sum over its labels
        divided by `num_items_in_batch`, is then `ranks` times its part of the true mean, and the mean over ranks is
        the true mean.

        If the model divides its tokens itself, only the loss arguments are divided here.

        Args:
            batch: Whole batch from the loader.

        Raises:
            ValueError: The batch cannot be divided. The message says why and what to do.
        """
        if not self.cuts:
            return self._with_item_count(batch), None
        rows, tokens, device = _size(batch)
        _check_tensors(batch, rows, tokens, self.in_model)
        targets = self._targets(batch, rows, tokens)
        layout = self._layout(batch, rows, tokens)
        order = layout.fed_order().to(device)

        def cut(whole: Tensor, fill: int = 0) -> Tensor:
            padding = (0, 0) * (whole.ndim - 2) + (0, layout.tokens - tokens)
            return F.pad(whole, padding, value=fill).index_select(1, order)

        part = copy.copy(batch)
        if not self.in_model:
            part.pop("attention_mask", None)
            part.update({name: cut(value) for name, value in part.items() if _is_per_token(value, rows, tokens)})
            positions = batch.get("position_ids")
            if positions is None:
                positions = torch.arange(tokens, device=device)[None]
            part["position_ids"] = held(positions, layout.tokens).index_select(1, order)
        if targets is not None:
            part["shift_labels"] = cut(targets, IGNORED)
            if self.takes_loss_arguments or "labels" in part:
                part["labels"] = part["shift_labels"].as_subclass(ShiftedLabels)
            part["num_items_in_batch"] = self._item_count(targets)
        return part, layout

    def _layout(self, batch: Batch, rows: int, tokens: int) -> TokenLayout:
        needed = multiple(self.ring, self.ulysses, self.shards)
        padded = -(-tokens // needed) * needed
        mask = batch.get("attention_mask")
        lengths = None if mask is None else right_padded_lengths(mask)
        if lengths is None and padded > tokens:
            lengths = (tokens,) * rows
        return TokenLayout(
            tokens=padded,
            ring=self.ring,
            ring_rank=self.ring_rank,
            ulysses=self.ulysses,
            ulysses_rank=self.ulysses_rank,
            shards=self.shards,
            bounds=self.bounds_of(rows, padded // (self.ring * self.ulysses * self.shards)),
            outside=self.slices_outside,
            contiguous=self.contiguous,
            documents=self.documents_of(batch, rows),
            lengths=lengths,
            largest_position=largest_position(batch, tokens),
        )

    def _targets(self, batch: Batch, rows: int, tokens: int) -> Tensor | None:
        """Returns the label of the token after each token, `[batch, tokens]`; `None` for a batch without labels."""
        name = "labels" if batch.get("shift_labels") is None else "shift_labels"
        labels = batch.get(name)
        if labels is None:
            return None
        if labels.shape != (rows, tokens):
            raise ValueError(
                f"the batch's {name} are {list(labels.shape)}, its tokens {[rows, tokens]}: give one label for each "
                f"token ({IGNORED} for none), or train with context_parallel_size=1 and tensor_parallel_size=1"
            )
        if name == "labels" and self.why_loss_unfit:
            raise ValueError(
                f"the batch has labels, but {self.why_loss_unfit}: let it compare all logits with shift_labels, the "
                "label of each token's successor, and divide the summed loss by num_items_in_batch"
            )
        if name == "labels" and not self.takes_loss_arguments:
            raise ValueError(
                "the batch has labels, but the model is no causal language model of transformers that accepts divided "
                "labels: give shift_labels [batch, tokens], the label of each token's successor, and divide the "
                "summed loss by the batch's num_items_in_batch"
            )
        return labels if name == "shift_labels" else F.pad(labels, (0, 1), value=IGNORED)[:, 1:]

    def _with_item_count(self, batch: Any) -> Any:
        # A single rank that computes the loss of all tokens already has the true mean.
        if self.ranks == 1 or not isinstance(batch, MutableMapping):
            return batch
        targets = batch.get("shift_labels")
        if targets is None and self.takes_loss_arguments and batch.get("labels") is not None:
            targets = batch["labels"][..., 1:]
        if targets is None:
            return batch
        whole = copy.copy(batch)
        whole["num_items_in_batch"] = self._item_count(targets)
        return whole

    def _item_count(self, targets: Tensor) -> Tensor:
        """Returns the number of labels over all data-parallel ranks divided by `ranks`, an fp32 scalar."""
        count = (targets != IGNORED).sum()
        if self.data_group is not None:
            dist.all_reduce(count, group=self.data_group)
        # A batch without any label has loss 0, not 0 / 0.
        return count.clamp(min=1).float() / self.ranks


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
    tokens = batch if isinstance(batch, Tensor) else _token_tensor(batch)
    if tokens is not None:
        return tokens
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((tensor for part in parts if (tensor := _first_tensor(part)) is not None), None)


def _token_tensor(batch: Any) -> Tensor | None:
    """Returns `input_ids` `[batch, tokens]` or `inputs_embeds` `[batch, tokens, hidden]`; `None` without both."""
    if not isinstance(batch, Mapping):
        return None
    ids, embeds = batch.get("input_ids"), batch.get("inputs_embeds")
    if isinstance(ids, Tensor) and ids.ndim == 2:
        return ids
    return embeds if isinstance(embeds, Tensor) and embeds.ndim == 3 else None


def _size(batch: Any) -> tuple[int, int, torch.device]:
    """Returns the rows, tokens and device of a batch."""
    tokens = _token_tensor(batch)
    if tokens is None or not isinstance(batch, MutableMapping) or 0 in tokens.shape:
        given = f"keys {list(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"a batch of {given} cannot be divided over processes: give a dict with input_ids [batch, tokens] or "
            "inputs_embeds [batch, tokens, hidden], or train with context_parallel_size=1 and tensor_parallel_size=1"
        )
    return tokens.shape[0], tokens.shape[1], tokens.device


def _is_per_token(value: Any, rows: int, tokens: int) -> bool:
    return isinstance(value, Tensor) and value.shape[:2] == (rows, tokens)


def _check_tensors(batch: Batch, rows: int, tokens: int, in_model: bool) -> None:
    """Raises for masks and positions that no layout can describe."""
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == (rows, tokens)):
        given = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"the batch's attention_mask is {given}: give a padding mask {[rows, tokens]}, pad on the right, and pack "
            "documents by position_ids that restart at 0"
        )
    if positions is not None and not (
        positions.ndim in ((2, 3) if in_model else (2,)) and positions.shape[-2] in (1, rows)
    ):
        raise ValueError(f"the batch's position_ids are {list(positions.shape)}: give {[rows, tokens]}, or leave them")
    if positions is not None and positions.shape[-1] != tokens:
        raise ValueError(f"the batch has {tokens} tokens and {positions.shape[-1]} position_ids: give one for each")
    if in_model:  # other tensors are not divided, and those of images may have any shape
        return
    for name, value in batch.items():
        if name.startswith("pixel_values"):
            raise ValueError(
                f"the batch has {name}, and the features of images have places among all tokens of a row: set "
                "sequence_parallel=False if the model has a text model inside, and otherwise context_parallel_size=1"
            )
        square = isinstance(value, Tensor) and value.ndim > 1 and value.shape[-2:] == (tokens, tokens)
        if square and name != "inputs_embeds" and value.shape != (rows, tokens):
            raise ValueError(
                f"the batch's {name} {list(value.shape)} relates tokens to tokens, and no process holds all tokens: "
                "omit it, and describe padding by attention_mask [batch, tokens] and documents by position_ids"
            )
