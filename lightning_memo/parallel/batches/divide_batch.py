"""Cuts a batch into the tokens of one process, and makes the loss of the parts add up to the loss of the whole.

All processes of one data-parallel index read the same batch. Each keeps its own positions of it, in the order in which
the model is fed: see :class:`~lightning_memo.parallel.batches.token_layout.TokenLayout`. Labels are shifted before
the cut, because the label of a part's last token is another process's token.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_memo.parallel.batches.positions import largest_position, packed_documents, right_padded_lengths
from lightning_memo.parallel.batches.token_layout import TokenLayout, multiple
from lightning_memo.utils.find_layers import find_hugging_face

IGNORED = -100
"""The label of a token that has no part in the loss."""

Batch = MutableMapping[str, Any]


def one_slice(batch: int, shard_tokens: int) -> tuple[int, ...]:
    """Slice bounds of an engine that runs each layer on all tokens at once."""
    return ()


@dataclass(frozen=True, slots=True)
class BatchSharder:
    """What one process keeps of a batch.

    Attributes:
        ring: Processes of a ring, and which of them this is.
        ulysses: Processes that exchange heads and tokens all-to-all, and which of them this is.
        shards: Sequence-parallel shards: the tensor-parallel size under sequence parallelism, else 1.
        ranks: Data-parallel times context-parallel size: losses are averaged over them.
        data_group: Data-parallel processes of the same context and tensor rank; `None` when there is one.
        takes_loss_arguments: What :func:`takes_loss_arguments` says of the model.
        bounds_of: Where the engine's slices end on one shard, from the batch rows and the tokens of a shard.
        slices_outside: As `outside` of the layout.
    """

    ring: int = 1
    ring_rank: int = 0
    ulysses: int = 1
    ulysses_rank: int = 0
    shards: int = 1
    ranks: int = 1
    data_group: dist.ProcessGroup | None = None
    takes_loss_arguments: bool = False
    bounds_of: Callable[[int, int], tuple[int, ...]] = one_slice
    slices_outside: bool = False

    @property
    def cuts(self) -> bool:
        """Whether a process gets other tokens, or another order of them, than the loader gave."""
        return self.ring * self.ulysses * self.shards > 1

    def shard(self, batch: Any) -> tuple[Any, TokenLayout | None]:
        """The part of a batch that this process computes, and where its tokens are.

        `input_ids` `[batch, tokens]` (or `inputs_embeds`) and every other tensor `[batch, tokens, ...]` are padded on
        the right and cut; `attention_mask` becomes the layout's lengths; `position_ids` are made where they are
        missing, and documents packed in a row become the layout's documents. All else passes unchanged, as does a whole
        batch that need not be cut, but for the loss arguments.

        Loss arguments go to models that compute their loss the Hugging Face way, and to batches that bring
        `shift_labels`: `labels` and `shift_labels` hold the shifted labels of this part, and `num_items_in_batch` is
        the number of labels over all data-parallel processes divided by `ranks`. A process's loss, the sum over its
        own labels divided by that, is `ranks` times its part of the true mean: the mean over ranks is the true mean.

        Raises:
            ValueError: The batch cannot be cut: what it lacks or has too much, and what to do.
        """
        if not self.cuts:
            return self._with_item_count(batch), None
        rows, tokens, device = _size(batch)
        _check_tensors(batch, rows, tokens)
        targets = self._targets(batch, rows, tokens)
        layout = self._layout(batch, rows, tokens)
        order = layout.fed_order().to(device)

        def cut(whole: Tensor, fill: int = 0) -> Tensor:
            padding = (0, 0) * (whole.ndim - 2) + (0, layout.tokens - tokens)
            return F.pad(whole, padding, value=fill).index_select(1, order)

        part = copy.copy(batch)
        part.pop("attention_mask", None)
        part.update({name: cut(value) for name, value in part.items() if _is_per_token(value, rows, tokens)})
        positions = batch.get("position_ids")
        if positions is None:
            positions = torch.arange(tokens, device=device)[None]
        part["position_ids"] = _held(positions, layout.tokens).index_select(1, order)
        if targets is not None:
            part["shift_labels"] = cut(targets, IGNORED)
            if self.takes_loss_arguments or "labels" in part:
                part["labels"] = part["shift_labels"]
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
            documents=packed_documents(batch, rows),
            lengths=lengths,
            largest_position=largest_position(batch, tokens),
        )

    def _targets(self, batch: Batch, rows: int, tokens: int) -> Tensor | None:
        """The label of each token's successor, `[batch, tokens]`; `None` for a batch without labels."""
        name = "labels" if batch.get("shift_labels") is None else "shift_labels"
        labels = batch.get(name)
        if labels is None:
            return None
        if labels.shape != (rows, tokens):
            raise ValueError(
                f"the batch's {name} are {list(labels.shape)}, its tokens {[rows, tokens]}: give one label for each "
                f"token ({IGNORED} for none), or train with context_parallel_size=1 and tensor_parallel_size=1"
            )
        if name == "labels" and not self.takes_loss_arguments:
            raise ValueError(
                "the batch has labels, but the model is no causal language model of transformers that can be told that "
                "they are cut: give shift_labels [batch, tokens], the label of each token's successor, and divide the "
                "summed loss by the batch's num_items_in_batch"
            )
        return labels if name == "shift_labels" else F.pad(labels, (0, 1), value=IGNORED)[:, 1:]

    def _with_item_count(self, batch: Any) -> Any:
        # One process that computes the loss of all tokens has its true mean already.
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
        """Labels of the whole batch, over all data-parallel processes, for each rank of the mean; fp32, `[]`."""
        count = (targets != IGNORED).sum()
        if self.data_group is not None:
            dist.all_reduce(count, group=self.data_group)
        # A batch without any label has loss 0, not 0 / 0.
        return count.clamp(min=1).float() / self.ranks


def takes_loss_arguments(model: nn.Module) -> bool:
    """Whether `shift_labels` and `num_items_in_batch` reach the loss of a Hugging Face model within `model`.

    Causal language models do, whose forward passes what it does not know to the loss; PEFT's wrappers pass it on.
    """
    host: Any = next(iter(find_hugging_face(model)), None)
    if host is None or host.loss_type is None or host.config.is_encoder_decoder:
        return False
    passes_on = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(host.forward).parameters.values())
    return (
        passes_on
        and getattr(host, "accepts_loss_kwargs", True)
        and {"shift_labels", "num_items_in_batch"} <= inspect.signature(host.loss_function).parameters.keys()
    )


def check_same_batch(batch: Any, group: dist.ProcessGroup, data_rank: int) -> None:
    """Makes sure that the processes that share a batch did get the same one; a collective of `group`.

    Args:
        batch: What this process's loader gave.
        group: Context- and tensor-parallel processes of one data-parallel index.
        data_rank: That index.

    Raises:
        ValueError: The batches differ; on all processes of the group.
    """
    if not same_on_all(batch, group):
        raise ValueError(
            f"the {dist.get_world_size(group)} processes of data-parallel rank {data_rank} got different batches, but "
            "they share one: shuffle with a seeded sampler (seed_everything), and let a dataset that divides its data "
            "by itself do so by trainer.strategy.data_parallel_rank, not by global rank"
        )


def same_on_all(batch: Any, group: dist.ProcessGroup) -> bool:
    """Whether all processes of `group` hold the same tokens: one all-gather of a few integers, whatever the shapes."""
    # Only CUDA tensors travel by NCCL, and batches may still be on the host.
    device = torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else "cpu"
    mine = _fingerprint(batch).to(device)
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, mine, group=group)
    return bool((torch.stack(everyones) == mine).all())


def _fingerprint(batch: Any) -> Tensor:
    """Dimensions and checksum of a batch's tokens, or of its first tensor; int64 `[5]`."""
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
    """`input_ids` `[batch, tokens]` or `inputs_embeds` `[batch, tokens, hidden]`; `None` if there is neither."""
    if not isinstance(batch, Mapping):
        return None
    ids, embeds = batch.get("input_ids"), batch.get("inputs_embeds")
    if isinstance(ids, Tensor) and ids.ndim == 2:
        return ids
    return embeds if isinstance(embeds, Tensor) and embeds.ndim == 3 else None


def _size(batch: Any) -> tuple[int, int, torch.device]:
    """Rows and tokens of a batch, and where it is."""
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


def _check_tensors(batch: Batch, rows: int, tokens: int) -> None:
    """Refuses masks and positions that no layout describes."""
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None and not (isinstance(mask, Tensor) and mask.shape == (rows, tokens)):
        given = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"the batch's attention_mask is {given}: give a padding mask {[rows, tokens]}, pad on the right, and pack "
            "documents by position_ids that restart at 0"
        )
    if positions is not None and (positions.ndim != 2 or positions.shape[0] not in (1, rows)):
        raise ValueError(f"the batch's position_ids are {list(positions.shape)}: give {[rows, tokens]}, or leave them")
    if positions is not None and positions.shape[1] != tokens:
        raise ValueError(f"the batch has {tokens} tokens and {positions.shape[1]} position_ids: give one for each")
    for name, value in batch.items():
        square = isinstance(value, Tensor) and value.ndim > 1 and value.shape[-2:] == (tokens, tokens)
        if square and name != "inputs_embeds" and value.shape != (rows, tokens):
            raise ValueError(
                f"the batch's {name} {list(value.shape)} relates tokens to tokens, which no process holds all of: "
                "leave it out, and describe padding by attention_mask [batch, tokens], documents by position_ids"
            )


def _held(positions: Tensor, tokens: int) -> Tensor:
    """Positions `[batch or 1, tokens]` padded on the right by the last one: tables of positions may end there."""
    return torch.cat([positions, positions[:, -1:].expand(-1, tokens - positions.shape[1])], 1)
