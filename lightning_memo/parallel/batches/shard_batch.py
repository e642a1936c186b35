"""Divides the tokens of batches over ranks, so that the losses of the parts add up to that of the whole.

All ranks of one data-parallel group read the same batch. Each keeps its own positions, in the order of the model's
input; see :class:`~lightning_memo.parallel.batches.token_layout.TokenLayout`. Labels are shifted before the batch is
divided, because the label of a part's last token is a token of another rank.

Note: [Where tokens are divided]
A text model gets a part of the batch. A model with a vision tower gets the whole batch: it computes position ids from
all tokens, and puts the features of images in the places of their tokens. Every process therefore runs the tower and
the embedding on whole rows, and the arguments of the text model inside are divided. The gradient that the embedding and
the tower get in a process is the part that comes through its own tokens; the sum over processes is the whole gradient.

A model that counts positions itself, makes masks without transformers' functions, or takes no divided labels gets the
whole batch, too, and every process runs all of it but the layers. Each call of a layer is divided: its input is cut,
and its output gathered. The gradients of both add over the processes, so that the mean over them is the gradient,
whatever is between the layers.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from typing_extensions import override

from lightning_memo.parallel.batches.packed_documents import packed_documents
from lightning_memo.parallel.batches.place_documents import (
    DocumentPlacement,
    Documents,
    PlacingCosts,
    place_documents,
)
from lightning_memo.parallel.batches.token_layout import (
    CurrentLayout,
    TokenLayout,
    how_to_compute_all,
    largest_position,
    multiple,
    right_padded_lengths,
)
from lightning_memo.utils.class_names import class_name
from lightning_memo.utils.find_layers import find_hugging_face, find_stacks

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
        global_slices: As `global_slices` of the layout.
        contiguous: As `contiguous` of the layout.
        documents_of: Returns the positions at which packed documents start in each row, from a batch and its rows.
        in_model: Whether the model divides its tokens itself; see Note: [Where tokens are divided].
        divides_layers: Whether each call of a layer may be divided by itself.
        why_layers: Why it has to be, as a clause, whatever the batch; empty if it has not.
        row_positions: Whether the model needs positions of each row, as those of several axes do.
        places: Whether short documents may lie whole on a process; see Note: [Documents of different lengths].
        joins_rows: Whether they may be those of several rows, which then follow one another in one row.
        may_need_padding: Returns whether a module may relate tokens to those of the padding, which is then kept.
        pairs: As `pairs` of :class:`~lightning_memo.parallel.batches.place_documents.PlacingCosts`.
        has_recurrences: Whether layers have recurrences, which in one process take padding as zeros.
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
    global_slices: bool = False
    contiguous: bool = False
    documents_of: Callable[[Batch, int], tuple[tuple[int, ...], ...] | None] = packed_documents
    in_model: bool = False
    divides_layers: bool = False
    why_layers: str = ""
    row_positions: bool = False
    places: bool = False
    joins_rows: bool = False
    may_need_padding: Callable[[], bool] = lambda: False
    pairs: int = 1
    has_recurrences: bool = False

    @property
    def cuts(self) -> bool:
        """Whether this rank gets other tokens than the loader returns, or another order of them."""
        return self.ring * self.ulysses * self.shards > 1

    def shard(self, batch: Any) -> tuple[Any, TokenLayout | None]:
        """Returns the part of a batch that this rank computes and the layout of its tokens.

        `input_ids` `[batch, tokens]` (or `inputs_embeds`) and every other tensor `[batch, tokens, ...]` are padded on
        the right and divided. `attention_mask` becomes the layout's lengths, missing `position_ids` are added, and
        documents packed in a row become the layout's documents. Other entries are unchanged. If short documents lie
        whole on a process, the part has a single row. A batch that need not be divided is unchanged except for the loss
        arguments, and has no layout.

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
        if self.why_layers and not self.divides_layers:
            raise ValueError(
                f"the model {self.why_layers}, so that its batches cannot be divided, and its layers only with context "
                "parallelism: set sequence_parallel=False, and with context_parallel_size no slices on the host "
                "and no pipeline"
            )
        rows, tokens, device = self._size(batch)
        targets = self._targets(batch, rows, tokens)
        layout = self.layout_of(batch, targets, targets is not None and has_rows_of_tokens(batch, rows, tokens))
        own = _OwnTokens(layout, device)
        part = copy.copy(batch)
        if not self.in_model:
            part.pop("attention_mask", None)
            part.update({name: own.cut(value) for name, value in part.items() if _is_per_token(value, rows, tokens)})
            positions = own.positions(batch.get("position_ids"), tokens)
            part["position_ids"] = positions.expand(own.rows(rows), -1) if self.row_positions else positions
        if targets is not None:
            part["shift_labels"] = own.cut(targets, IGNORED)
            if self.takes_loss_arguments or "labels" in part:
                part["labels"] = part["shift_labels"].as_subclass(ShiftedLabels)
            part["num_items_in_batch"] = self._item_count(targets)
        return part, layout

    def why_in_layers(self, batch: Any) -> str:
        """Returns why each call of a layer is divided by itself, as a clause; empty if the batch is divided.

        Args:
            batch: Whole batch from the loader.
        """
        if not (self.cuts and self.divides_layers and isinstance(batch, MutableMapping)):
            return ""
        tokens, labels = token_tensor(batch), batch.get("labels")
        if self.why_layers or tokens is None:
            return self.why_layers or "takes a batch without input_ids or inputs_embeds"
        if not self.in_model and any(name.startswith("pixel_values") for name in batch):
            return "puts features of images among all tokens of a row"
        if labels is None or batch.get("shift_labels") is not None or self.why_loss_unfit:
            return ""
        divisible = self.takes_loss_arguments and labels.shape == tokens.shape[:2]
        return "" if divisible else "computes its loss from the labels of all tokens"

    def shard_layers(self, batch: Batch) -> Batch:
        """Returns a batch for a model of which each call of a layer is divided by itself.

        Raises:
            ValueError: Rows hold several documents.
        """
        tokens = token_tensor(batch)
        if tokens is not None and packed_documents(batch, tokens.shape[0]) is not None:
            raise ValueError(
                "position_ids tell that rows hold several documents, and only the layers of this model are divided: "
                "pass one document in each row, or set context_parallel_size=1"
            )
        alone = replace(self, ranks=self.ranks // (self.ring * self.ulysses))
        whole: Batch = alone._with_item_count(batch)
        return whole

    def layout_of_layer(self, batch_rows: int, rows: int, tokens: int) -> TokenLayout:
        """Returns the layout of one call of a layer.

        Args:
            batch_rows: Number of rows of the batch.
            rows: First dimension of the layer's input.
            tokens: Its second dimension.

        Raises:
            ValueError: The first dimension is not that of rows.
        """
        if rows != batch_rows:
            raise ValueError(
                f"only the layers of this model are divided, and one got [{rows}, {tokens}, ...] for a batch of "
                f"{batch_rows} rows, so that it is not known where its tokens are: set context_parallel_size=1"
            )
        return self._layout(rows, tokens)

    def layout_of(self, batch: Any, targets: Tensor | None = None, may_place: bool = False) -> TokenLayout:
        """Returns the layout of the tokens of a batch that is divided.

        Args:
            batch: Whole batch.
            targets: Label of the token after each token, `[batch, tokens]`; `None` if there are none.
            may_place: Whether this process may get the tokens of several rows in one, and no padding.

        Raises:
            ValueError: The batch cannot be divided. The message says why and what to do.
        """
        rows, tokens, _ = self._size(batch)
        _check_tensors(batch, rows, tokens, self.in_model)
        largest, mask = largest_position(batch, tokens), batch.get("attention_mask")
        lengths = None if mask is None else right_padded_lengths(mask)
        documents = self.documents_of(batch, rows)
        counts_padding = (
            targets is not None and lengths is not None and bool(((targets != IGNORED) & (mask == 0)).any())
        )
        uses_padding = lengths is not None and (targets is None or counts_padding)
        if uses_padding and self.has_recurrences:
            _tell_of_padding(counts_padding)
        placement = self._place(rows, tokens, lengths, documents) if may_place and not uses_padding else None
        if placement is not None:
            rows, tokens, lengths, documents = 1, placement.tokens, None, (placement.starts,)
        return self._layout(
            rows,
            tokens,
            lengths=lengths,
            uses_padding=uses_padding,
            shards=self.shards,
            bounds=self.bounds_of(rows, self._padded(tokens) // (self.ring * self.ulysses * self.shards)),
            global_slices=self.global_slices,
            documents=documents,
            largest_position=largest,
            placement=placement,
        )

    def _place(
        self, rows: int, tokens: int, lengths: tuple[int, ...] | None, documents: Documents | None
    ) -> DocumentPlacement | None:
        """Returns where the documents of a batch are; `None` if every row is divided."""
        if not self.places or self.global_slices or (rows > 1 and not self.joins_rows):
            return None
        if lengths is None and documents is None:
            return None
        if lengths is not None and self.may_need_padding():
            return None
        needed = multiple(self.ring, self.ulysses, self.shards)
        costs = PlacingCosts(self.ring, self.ulysses, needed, self.pairs)
        return place_documents(rows, tokens, documents, lengths, costs)

    def _layout(self, rows: int, tokens: int, lengths: tuple[int, ...] | None = None, **of_batch: Any) -> TokenLayout:
        """Returns the layout of some rows, which are padded to what the processes divide."""
        padding = self._padded(tokens) - tokens
        return TokenLayout(
            tokens=tokens + padding,
            padding=padding,
            ring=self.ring,
            ring_rank=self.ring_rank,
            ulysses=self.ulysses,
            ulysses_rank=self.ulysses_rank,
            contiguous=self.contiguous,
            lengths=(tokens,) * rows if lengths is None and padding else lengths,
            **of_batch,
        )

    @property
    def _how_to_compute_all(self) -> str:
        return how_to_compute_all(self.ring * self.ulysses, self.shards)

    def _size(self, batch: Any) -> tuple[int, int, torch.device]:
        """Returns the rows, tokens and device of a batch."""
        tokens = token_tensor(batch)
        if tokens is None or not isinstance(batch, MutableMapping) or 0 in tokens.shape:
            given = f"keys {list(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(
                f"a batch of {given} cannot be divided over processes: give a dict with input_ids [batch, tokens] or "
                f"inputs_embeds [batch, tokens, hidden], or train with {self._how_to_compute_all}"
            )
        return tokens.shape[0], tokens.shape[1], tokens.device

    def _padded(self, tokens: int) -> int:
        needed = multiple(self.ring, self.ulysses, self.shards)
        return -(-tokens // needed) * needed

    def _targets(self, batch: Batch, rows: int, tokens: int) -> Tensor | None:
        """Returns the label of the token after each token, `[batch, tokens]`; `None` for a batch without labels."""
        name = "labels" if batch.get("shift_labels") is None else "shift_labels"
        labels = batch.get(name)
        if labels is None:
            return None
        if labels.shape != (rows, tokens):
            raise ValueError(
                f"the batch's {name} are {list(labels.shape)}, its tokens {[rows, tokens]}: give one label for each "
                f"token ({IGNORED} for none), or train with {self._how_to_compute_all}"
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
        return labels if name == "shift_labels" else shifted(labels)

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


def shifted(labels: Tensor) -> Tensor:
    """Returns the label of the token after each token, `[batch, tokens]`, from that of each."""
    return F.pad(labels, (0, 1), value=IGNORED)[:, 1:]


def has_rows_of_tokens(batch: Mapping[str, Any], rows: int, tokens: int) -> bool:
    """Returns whether a batch has one row, or nothing in it belongs to rows but their tokens."""
    return rows == 1 or all(
        value is None
        or isinstance(value, bool | int | float | str)
        or (isinstance(value, Tensor) and (value.ndim == 0 or value.shape[:2] in ((rows, tokens), (1, tokens))))
        for value in batch.values()
    )


def _tell_of_padding(has_labels: bool) -> None:
    """Tells that a loss may use hidden states of padding behind recurrences.

    Args:
        has_labels: Whether padding has labels, so that a loss does use them.

    Raises:
        ValueError: It has.
    """
    why = "recurrences get no padding mask where processes share tokens, which changes hidden states of padding"
    if has_labels:
        raise ValueError(f"padding has labels, and {why}: set them to -100 (labels[attention_mask == 0] = -100)")
    rank_zero_warn(f"{why}: leave padding out of the loss")


def rows_of(batch: Batch) -> int:
    """Returns the number of rows of a batch: the first dimension of its tokens, or else of its labels."""
    tokens = token_tensor(batch)
    tokens = first_tensor(batch.get("labels", batch)) if tokens is None else tokens
    return 0 if tokens is None else tokens.shape[0]


def token_tensor(batch: Any) -> Tensor | None:
    """Returns `input_ids` `[batch, tokens]` or `inputs_embeds` `[batch, tokens, hidden]`; `None` without both."""
    if not isinstance(batch, Mapping):
        return None
    ids, embeds = batch.get("input_ids"), batch.get("inputs_embeds")
    if isinstance(ids, Tensor) and ids.ndim == 2:
        return ids
    return embeds if isinstance(embeds, Tensor) and embeds.ndim == 3 else None


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


class _OwnTokens:
    """Takes the tokens of a rank out of tensors of all tokens, in the order of the model's input.

    Args:
        layout: Layout of the tokens.
        device: Device of the tensors.
    """

    def __init__(self, layout: TokenLayout, device: torch.device) -> None:
        self._layout = layout
        sources = layout.sources()
        self._joins = sources is not None
        self._order = (layout.fed_order() if sources is None else sources).to(device)

    def rows(self, rows: int) -> int:
        """Returns the number of rows of this rank's tokens."""
        return 1 if self._joins else rows

    def cut(self, whole: Tensor, fill: int = 0) -> Tensor:
        """Returns the part of a tensor `[batch or 1, tokens, ...]`, which is padded on the right.

        Args:
            whole: The tensor.
            fill: Value of the padding.
        """
        if self._joins:
            rows = self._layout.rows_of_batch(1)
            whole = whole.expand(rows, *whole.shape[1:]).flatten(0, 1)[None]  # type: ignore[assignment]
        count = 1 if self._joins else self._layout.tokens - whole.shape[1]
        padding = (0, 0) * (whole.ndim - 2) + (0, count)
        order = self._order % (whole.shape[1] + count)  # -1 is the padding
        return F.pad(whole, padding, value=fill).index_select(1, order)

    def positions(self, whole: Tensor | None, tokens: int) -> Tensor:
        """Returns the positions of the tokens, `[..., tokens of this rank]`.

        Args:
            whole: Positions of all tokens, `[..., tokens]`; `None` if they count from 0.
            tokens: Number of all tokens.
        """
        if whole is None:
            whole = torch.arange(tokens, device=self._order.device)[None]
        if self._joins:
            return self.cut(whole)
        # Padding has the last position, because position tables may end there.
        padding = whole[..., -1:].expand(*whole.shape[:-1], self._layout.tokens - whole.shape[-1])
        return torch.cat([whole, padding], -1).index_select(-1, self._order)


class ShiftedLabels(Tensor):
    """Labels `[batch, tokens]`, each of its token's successor, that refuse to be shifted like labels of whole rows.

    Results of operations on them are plain tensors.
    """

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and _drops_first_token(args[1]):
            raise ValueError(
                'batch["labels"][:, 1:] would shift the labels twice, because they were shifted before the batch was '
                'divided: compare the logits of all tokens with batch["shift_labels"], and divide the summed loss by '
                'batch["num_items_in_batch"]'
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def _drops_first_token(index: Any) -> bool:
    """Return whether an index is `[:, 1:]` or `[..., 1:]`."""
    if not isinstance(index, tuple) or len(index) != 2 or not all(part is ... or type(part) is slice for part in index):
        return False
    return index in ((..., slice(1, None)), (slice(None), slice(1, None)))


class TextModelInputs:
    """Divides the arguments of the text model in each of its forwards.

    Args:
        current: Holds the layout of the batch.
    """

    def __init__(self, current: CurrentLayout) -> None:
        self._current = current

    def attach(self, text_model: nn.Module) -> Callable[[], None]:
        """Divide the arguments of `text_model`. Returns a function that undoes this."""
        self._current.text_model = text_model
        handle = text_model.register_forward_pre_hook(self._divide, with_kwargs=True)

        def undo() -> None:
            self._current.text_model = None
            handle.remove()

        return undo

    def _divide(
        self, text_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        layout = self._current.layout
        if layout is None:
            return args, kwargs
        # In the order of the signature, as a call may give some arguments by position.
        given = dict(zip(inspect.signature(text_model.forward).parameters, args, strict=False)) | kwargs
        whole = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        rows, tokens = whole.shape[:2]  # type: ignore[union-attr]
        if not 0 <= layout.padded_row_tokens - tokens < multiple(layout.ring, layout.ulysses, layout.shards):
            raise ValueError(
                f"{class_name(text_model)} got rows of {tokens} tokens, but the last batch was divided into "
                f"{layout.local_tokens}: with context_parallel_size, run the model on the batches that its steps are "
                "given, and generate text in one process"
            )
        return (), _divide_arguments(given, rows, tokens, layout)


def _divide_arguments(given: Mapping[str, Any], rows: int, tokens: int, layout: TokenLayout) -> dict[str, Any]:
    """Return the arguments of a text model for the tokens of one process.

    Tensors `[rows, tokens, ...]` are padded on the right and divided. So are positions `[axes, rows, tokens]` and the
    features that are added to image tokens between layers (DeepStack). The layout knows what a padding mask says.

    Args:
        given: Arguments by name for `rows` whole rows of `tokens` tokens.
        rows: Number of rows.
        tokens: Number of tokens of each.
        layout: Layout of the tokens.
    """
    device = next(t.device for t in given.values() if isinstance(t, Tensor))
    own = _OwnTokens(layout, device)

    def is_per_token(value: Any) -> bool:
        return isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] in (1, rows) and value.shape[1] == tokens

    part = {name: own.cut(value) if is_per_token(value) else value for name, value in given.items()}
    part["position_ids"] = own.positions(given.get("position_ids"), tokens)
    if is_per_token(given.get("attention_mask")):
        part["attention_mask"] = None
    images, features = given.get("visual_pos_masks"), given.get("deepstack_visual_embeds")
    if images is not None and features is not None:
        numbers = images.flatten().cumsum(0).view_as(images) - 1
        rows_of_images = own.cut(numbers)[part["visual_pos_masks"]]
        part["deepstack_visual_embeds"] = [of_layer.index_select(0, rows_of_images) for of_layer in features]
    return part


def check_layers(model: nn.Module, text_model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """Check that the layers to swap are in the text model, whose tokens are divided.

    Raises:
        ValueError: They are those of a tower.
    """
    if not set(layers) <= set(text_model.modules()):
        name = next(name for name, module in model.named_modules() if module is text_model)
        raise ValueError(
            f"context_parallel_size divides the tokens of {name}, and the layers of another part of the model were to "
            f'be swapped: set layers="{name}.{find_stacks(text_model)[0].name}"'
        )


def trains_beside(model: nn.Module, text_model: nn.Module) -> bool:
    """Return whether weights are trained that only some batches use: those of towers, but not of the head."""
    hosts: list[Any] = find_hugging_face(model)
    heads = (head for host in hosts if (head := host.get_output_embeddings()) is not None)
    used = {p for module in (text_model, *heads) for p in module.parameters()}
    return any(p.requires_grad and p not in used for p in model.parameters())


def first_tensor(batch: Any) -> Tensor | None:
    """Returns the tokens of a batch, or else its first tensor; `None` if it has none."""
    tokens = batch if isinstance(batch, Tensor) else token_tensor(batch)
    if tokens is not None:
        return tokens
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((tensor for part in parts if (tensor := first_tensor(part)) is not None), None)
