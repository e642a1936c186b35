"""Where the tokens of a batch are: positions and padding, and which rank holds which of them.

Every context-parallel rank uses two orders of its tokens. Attention uses the *layer order*: zigzag over ring ranks, so
that causal work is even, then contiguous over all-to-all ranks. Long documents that are packed in a row are divided one
by one, because a token attends to its own document only. The model gets tokens in *fed order*: with sequence
parallelism each shard holds its part of every slice, so that gathering a slice from all shards gives a contiguous range
of the layer order. If attention runs slice after slice, each slice is a range of the whole sequence and is divided by
itself, so that earlier slices are the past of all ranks. Layers that hand a state from token to token need contiguous
ranges, in the order of the ranks. All permutations are applied once, to the batch.

If a batch has documents of different lengths, only the long ones may be divided: see
Note: [Documents of different lengths]. Positions are then those in the sequence of attention.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_memo.parallel.batches.place_documents import DocumentPlacement, Documents


def why_positions_unknown(model: nn.Module) -> str:
    """Returns why a model cannot be told the positions of some of its tokens, as a clause; empty if it can."""
    parts = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    if not any("position_ids" in inspect.signature(part.forward).parameters for part in parts):
        return "takes no position_ids"
    if any(_counts_padding(module) for module in model.modules()):
        return "counts positions by the padding tokens among all tokens"
    if any(hasattr(module, "axial_pos_shape") for module in model.modules()):
        return "has axial positions for sequences of one length"
    return ""


def takes_attention_functions(model: nn.Module) -> bool:
    """Return whether a Hugging Face model calls the attention function that it is told, and makes masks for it."""
    hosts: list[Any] = [module for module in model.modules() if hasattr(module, "set_attn_implementation")]
    ask_classes_of_transformers(hosts)
    return all(host._can_set_attn_implementation() and not asks_attention_name(host) for host in hosts)


def asks_attention_name(model: nn.Module) -> bool:
    """Return whether attention of a Hugging Face model computes otherwise with other functions than transformers' own.

    Sparse attention leaves the choice of keys to functions that it does not know by name.
    """
    config = model.config
    parts = {type(module) for module in model.modules() if getattr(module, "config", None) is config}
    return any("Attention" in kind.__name__ and _names_sdpa(kind) for kind in parts)


@functools.cache
def _names_sdpa(kind: type[nn.Module]) -> bool:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    constants = () if code is None else code.co_consts
    return any("sdpa" in each if isinstance(each, tuple) else each == "sdpa" for each in constants)


def ask_classes_of_transformers(models: Iterable[nn.Module]) -> None:
    """Let transformers find out from the source of its own classes whether models take attention functions.

    FSDP2 gives a model a class of its own, derived from the model's class, whose source says nothing. It inherits the
    answer.
    """
    for model in models:
        kinds = (kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers."))
        if (kind := next(kinds, None)) is not None:
            kind._can_set_attn_implementation()  # type: ignore[attr-defined]


def _counts_padding(module: nn.Module) -> bool:
    """Returns whether a module's positions begin after the id of the padding token, like RoBERTa's and fairseq's."""
    table = getattr(module, "position_embeddings", None)
    if isinstance(table, nn.Embedding) and table.padding_idx is not None:
        return True
    return hasattr(module, "create_position_ids_from_input_ids") and getattr(module, "padding_idx", None) is not None


def largest_position(batch: Mapping[str, Any], tokens: int) -> int:
    """Returns the largest position of a batch. Without `position_ids`, positions count from 0."""
    positions = batch.get("position_ids")
    return tokens - 1 if positions is None else int(positions.max())


def right_padded_lengths(attention_mask: Tensor) -> tuple[int, ...] | None:
    """Returns the number of valid tokens in each row of a padding mask `[batch, tokens]`; `None` if all are valid.

    Raises:
        ValueError: Padding is not on the right, or a row has no valid token.
    """
    valid = attention_mask.bool()
    lengths = valid.sum(-1)
    on_the_right = torch.arange(valid.shape[-1], device=valid.device) < lengths[:, None]
    wrong = (valid != on_the_right).any() | (lengths == 0).any()
    is_wrong, *counts = torch.cat([wrong[None].to(lengths.dtype), lengths]).tolist()  # the host waits once for all
    if is_wrong:
        raise ValueError(
            "attention_mask has padding that is not on the right, or a row without valid tokens: pad on the right "
            '(tokenizer.padding_side = "right")'
        )
    return None if min(counts) == valid.shape[-1] else tuple(counts)


def valid_ranges(attention_mask: Tensor) -> list[tuple[int, int]] | None:
    """Returns the first and the end of the valid tokens of each row of a padding mask `[batch, tokens]`.

    A row without valid tokens begins and ends after its last token. The result is empty if all tokens are valid, and
    `None` if the valid tokens of a row do not follow one another.
    """
    valid = attention_mask.bool()
    first, count = first_and_count(valid)
    # The host waits once for all.
    rows = list(zip(*torch.stack([first, first + count, valid.any(-1)]).tolist(), strict=True))
    tokens = valid.shape[-1]
    if any(start == stop and some for start, stop, some in rows):
        return None
    if all((start, stop) == (0, tokens) for start, stop, _ in rows):
        return []
    return [(start, stop) if some else (tokens, tokens) for start, stop, some in rows]


def first_and_count(valid: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first true entry of each row of a boolean `[..., entries]`, and the number of true entries.

    The number is 0 if the true entries of a row do not follow one another, or if there are none.
    """
    entries = valid.view(torch.uint8)  # sums of booleans take much longer
    runs = (valid[..., 1:] > valid[..., :-1]).view(torch.uint8).sum(-1, dtype=torch.int32) + entries[..., 0]
    return entries.argmax(-1), torch.where(runs == 1, entries.sum(-1, dtype=torch.int32), 0)


# Shorter documents are not divided one by one: their attention takes less time than more kernel calls would.
_MOST_PARTS = 64


def documents_within(documents: Documents | None, start: int, stop: int) -> Documents | None:
    """Returns the documents of a range of positions, which count from its start; `None` for one document per row.

    Args:
        documents: As `documents` of :class:`TokenLayout`. One of each row starts at `start`.
        start: The first position.
        stop: The position behind the last one.
    """
    found = tuple(tuple(edge - start for edge in starts if start <= edge < stop) for starts in documents or ())
    return found if any(len(starts) > 1 for starts in found) else None


def multiple(ring: int, ulysses: int, shards: int) -> int:
    """Returns the number that the padded length must be a multiple of.

    Ring ranks hold two chunks each, and every shard has the same number of tokens.
    """
    return ring * math.lcm(2 if ring > 1 else 1, ulysses * shards)


def slice_multiple(ring: int, ulysses: int, shards: int) -> int:
    """Returns the number that a shard's tokens in a slice must be a multiple of, if ranks divide every slice."""
    return multiple(ring, ulysses, shards) // (ring * ulysses * shards)


def how_to_compute_all(processes: int, shards: int) -> str:
    """Returns the settings with which a process computes all tokens of its rows at once, where it has some of them.

    Only what divides tokens now is named: not every program has all of these settings.

    Args:
        processes: Number of context-parallel processes.
        shards: Number of sequence-parallel shards.
    """
    divided = {"context_parallel_size=1": processes, "sequence_parallel=False": shards}
    return " and ".join(name for name, parts in divided.items() if parts > 1) or 'stream_from_host="hidden"'


def zigzag(section: range, ring: int, ring_rank: int) -> tuple[range, ...]:
    """Returns the positions of a section that a ring rank and its all-to-all group hold: head and tail, or all."""
    if ring == 1:
        return (section,)
    size = len(section) // (2 * ring)
    head, tail = section.start + ring_rank * size, section.start + (2 * ring - 1 - ring_rank) * size
    return range(head, head + size), range(tail, tail + size)


def ring_chunks(
    section: range, ring: int, ring_rank: int, documents: Documents | None, contiguous: bool = False
) -> list[range]:
    """Returns the positions of a section that a ring rank and its all-to-all group hold, in layer order.

    The section is cut at the edges of documents, and each part is divided in zigzag order. All ranks then have the same
    work in a document, also if it is cut into several parts.

    Args:
        section: Positions to divide. Start and length are multiples of `2 * ring`.
        ring: Number of ring ranks.
        ring_rank: Rank in the ring.
        documents: As `documents` of :class:`TokenLayout`.
        contiguous: As `contiguous` of :class:`TokenLayout`.
    """
    if contiguous:
        size = len(section) // ring
        return [section[ring_rank * size : (ring_rank + 1) * size]]
    parts = (section,) if ring == 1 or documents is None else _parts(section, 2 * ring, documents)
    return [chunk for part in parts for chunk in zigzag(part, ring, ring_rank)]


@functools.lru_cache(maxsize=256)  # every attention call of a batch asks for the same
def _parts(section: range, unit: int, documents: Documents) -> tuple[range, ...]:
    """Cuts a section near the edges of its documents, the longest ones first, at multiples of `unit`."""
    least = max(unit, len(section) // _MOST_PARTS)
    cuts = [section.start, section.stop]
    spans = [span for starts in documents for span in pairwise((*starts, section.stop))]
    for span in sorted(spans, key=lambda span: span[0] - span[1]):
        for edge in span:
            cut = min(max((edge + unit // 2) // unit * unit, section.start), section.stop)
            if all(abs(cut - other) >= least for other in cuts):
                cuts.append(cut)
    return tuple(range(a, b) for a, b in pairwise(sorted(cuts)))


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """The tokens of one rank. Its context-parallel rank is `ring_rank * ulysses + ulysses_rank`.

    Attributes:
        tokens: Length of the whole padded sequence.
        ring: Number of ranks in a ring (the outer group).
        ring_rank: Rank in the ring.
        ulysses: Number of ranks that exchange heads and tokens all-to-all (the inner group).
        ulysses_rank: Rank in the all-to-all group.
        shards: Number of sequence-parallel shards: the tensor-parallel size with sequence parallelism, otherwise 1.
        bounds: Slice bounds on one shard, the last one at `tokens / ring / ulysses / shards`; empty for one slice.
        global_slices: Whether a slice is a range of the whole sequence that is divided over the context-parallel ranks.
            Otherwise each rank slices its own tokens.
        contiguous: Whether the tokens of a section that a rank holds follow one another, and those of the next rank
            follow them.
        documents: Positions in each batch row at which documents start, the first at 0; `None` for one document per
            row.
        lengths: Number of valid tokens in each batch row (right padding); `None` if all tokens are valid.
        uses_padding: Whether a loss may use the hidden states of padding. Causal attention then hides the keys of
            padding, as in one process. Otherwise only padding would see them.
        largest_position: Largest position of the batch without padding, on which some rotary frequencies depend;
            `None` for `tokens - 1`.
        padding: Number of tokens by which all rows were padded on the right.
        placement: Where the documents of the batch are, if only some of them are divided; `None` if all rows are.

    Raises:
        ValueError: The numbers are inconsistent. The message names them.
    """

    tokens: int
    ring: int = 1
    ring_rank: int = 0
    ulysses: int = 1
    ulysses_rank: int = 0
    shards: int = 1
    bounds: tuple[int, ...] = ()
    global_slices: bool = False
    contiguous: bool = False
    documents: Documents | None = None
    lengths: tuple[int, ...] | None = None
    uses_padding: bool = False
    largest_position: int | None = None
    padding: int = 0
    placement: DocumentPlacement | None = None

    def __post_init__(self) -> None:
        self._check_ranks()
        self._check_bounds()
        self._check_rows()

    def of_rows(self, start: int, count: int) -> TokenLayout:
        """Return the layout of some rows of the batch, whose tokens are in the same order.

        Args:
            start: The first row.
            count: Number of rows.

        Raises:
            ValueError: The order depends on the documents of all rows.
        """
        rows = slice(start, start + count)
        documents = None if self.documents is None else self.documents[rows]
        if self.ring > 1 and documents != self.documents:
            raise ValueError(
                "pipeline_parallel_size: rows with several documents are divided over a ring by the documents of all "
                "rows, and micro-batches have some of them: set ulysses_size=context_parallel_size, or "
                "pipeline_parallel_size=1"
            )
        return replace(self, documents=documents, lengths=None if self.lengths is None else self.lengths[rows])

    @property
    def how_to_compute_all(self) -> str:
        """As :func:`how_to_compute_all`. A layout that divides nothing is that of a model that runs slice by slice."""
        return how_to_compute_all(self.ring * self.ulysses, self.shards)

    @property
    def row_tokens(self) -> int:
        """Number of tokens of a row of the batch, without the padding of all rows."""
        return self.tokens - self.padding if self.placement is None else self.placement.row_tokens

    @property
    def padded_row_tokens(self) -> int:
        """Number of tokens of a row of the batch, with the padding of all rows."""
        return self.tokens if self.placement is None else self.placement.row_tokens

    def rows_of_batch(self, rows: int) -> int:
        """Return the number of rows of the batch if the model gets `rows` of them."""
        return rows if self.placement is None else self.placement.rows

    @property
    def local_tokens(self) -> int:
        """Number of tokens of this context-parallel rank, over all its shards."""
        return self.tokens // (self.ring * self.ulysses)

    @property
    def bounds_of_order(self) -> tuple[int, ...]:
        """The slice bounds if they decide in which order a process has its tokens; empty if they do not."""
        return self.bounds if self.global_slices or self.shards > 1 else ()

    @property
    def sections(self) -> tuple[range, ...]:
        """Ranges of positions, each of which is divided over the context-parallel ranks."""
        if self.placement is not None:
            return (range(self.placement.shared_tokens),) if self.placement.shared_tokens else ()
        if not (self.global_slices and self.bounds):
            return (range(self.tokens),)
        parts = self.ring * self.ulysses * self.shards
        return tuple(range(a * parts, b * parts) for a, b in pairwise((0, *self.bounds)))

    def layer_order(self) -> Tensor:
        """Returns the positions of this rank's tokens in the order of attention, int64 `[local_tokens]`."""
        parts = [self._own_part(section) for section in self.sections]
        if self.placement is not None:
            size = self.placement.whole_tokens
            start = self.placement.shared_tokens + (self.ring_rank * self.ulysses + self.ulysses_rank) * size
            parts.append(torch.arange(start, start + size))
        return torch.cat(parts)

    def _own_part(self, section: range) -> Tensor:
        documents = self.documents
        if self.placement is not None:
            documents = documents_within(documents, section.start, section.stop)
        chunks = ring_chunks(section, self.ring, self.ring_rank, documents, self.contiguous)
        return torch.cat([torch.arange(c.start, c.stop) for c in chunks]).chunk(self.ulysses)[self.ulysses_rank]

    def position_of(self, token: int) -> int:
        """Returns the position of a token of the layer order, where a rank holds contiguous ranges."""
        parts = self.ring * self.ulysses
        for section in self.sections:
            own = len(section) // parts
            if token < own:
                return section.start + (self.ring_rank * self.ulysses + self.ulysses_rank) * own + token
            token -= own
        raise ValueError(f"token {token + self.local_tokens} of {self.local_tokens}")

    def fed_order(self) -> Tensor:
        """Returns the positions of this rank's tokens in the order of the model's input, int64 `[local_tokens]`.

        Shard `t` is the `t`-th contiguous part of `1 / shards`. The tokens `[a, b)` of a slice, concatenated over the
        shards, are the tokens `[shards * a, shards * b)` of the layer order.
        """
        return self.as_fed(self.layer_order(), 0)

    def sources(self) -> Tensor | None:
        """Returns the token of the batch for each token of the fed order, int64 `[local_tokens]`; -1 for padding.

        Rows of the batch follow one another. The result is `None` if every row is divided.
        """
        return None if self.placement is None else self.placement.sources()[self.fed_order()]

    def valid(self) -> Tensor | None:
        """Returns which tokens of the fed order are no padding, `[rows, local_tokens]`; `None` if all are."""
        sources = self.sources()
        if sources is not None:
            return (sources >= 0)[None]
        return None if self.lengths is None else self.fed_order()[None] < torch.tensor(self.lengths)[:, None]

    def as_fed(self, t: Tensor, dim: int) -> Tensor:
        """Returns a tensor whose dimension `dim` has the tokens of the layer order, with these in fed order."""
        slices = [part.chunk(self.shards, dim) for part in t.split([self.shards * n for n in self._lengths], dim)]
        return torch.cat([parts[shard] for shard in range(self.shards) for parts in slices], dim)

    def as_attended(self, t: Tensor, dim: int) -> Tensor:
        """Inverse of :meth:`as_fed`."""
        shards = [shard.split(self._lengths, dim) for shard in t.chunk(self.shards, dim)]
        return torch.cat([part for parts in zip(*shards, strict=True) for part in parts], dim)

    @property
    def _lengths(self) -> list[int]:
        """Numbers of tokens of the slices on one shard."""
        return [b - a for a, b in pairwise((0, *(self.bounds or (self.local_tokens // self.shards,))))]

    def _check_ranks(self) -> None:
        for name, size, rank in (
            ("ring", self.ring, self.ring_rank),
            ("ulysses", self.ulysses, self.ulysses_rank),
            ("shards", self.shards, 0),
        ):
            if size < 1 or not 0 <= rank < size:
                raise ValueError(f"{name} has {size} processes and rank {rank}: ranks count from 0, and must be fewer")
        needed = multiple(self.ring, self.ulysses, self.shards)
        if self.tokens < 1 or self.tokens % needed:
            raise ValueError(
                f"{self.tokens} tokens over ring {self.ring}, ulysses {self.ulysses} and {self.shards} shards: "
                f"pad to a multiple of {needed}"
            )

    def _check_bounds(self) -> None:
        if not self.bounds:
            return
        last = self.local_tokens // self.shards
        if self.bounds[-1] != last or not all(a < b for a, b in pairwise((0, *self.bounds))):
            raise ValueError(f"slice bounds {self.bounds} must increase from above 0 to {last}, the tokens of a shard")
        needed = slice_multiple(self.ring, self.ulysses, self.shards)
        if self.global_slices and any(bound % needed for bound in self.bounds):
            raise ValueError(f"slice bounds {self.bounds} of a ring must be multiples of {needed}")

    def _check_rows(self) -> None:
        if self.placement is not None and (self.global_slices or self.contiguous):
            raise ValueError("documents that lie whole on a process have no slices or ranges that processes share")
        for starts in self.documents or ():
            if not starts or starts[0] != 0 or starts[-1] >= self.tokens or not all(a < b for a, b in pairwise(starts)):
                raise ValueError(f"documents at {starts} must start at 0 and increase to below {self.tokens} tokens")
        for length in self.lengths or ():
            if not 0 <= length <= self.tokens:
                raise ValueError(f"a row of {length} valid tokens does not fit in {self.tokens} tokens")
        if self.documents is not None and self.lengths is not None and len(self.documents) != len(self.lengths):
            raise ValueError(f"documents of {len(self.documents)} batch rows, but lengths of {len(self.lengths)}")


_whole: ContextVar[bool] = ContextVar("whole_rows", default=False)


@contextlib.contextmanager
def with_whole_rows() -> Iterator[None]:
    """Within this context, modules get the tokens of all processes, as in plain training."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


def has_whole_rows() -> bool:
    """Return whether the running module has the tokens of all processes, although its layer does not."""
    return _whole.get()


class CurrentLayout:
    """The layout of the current batch. The object that divides batches owns and sets it.

    Attributes:
        layout: Layout of the tokens of the batch; `None` if this rank holds all tokens in order, or if the running
            module does.
        text_model: The module whose forward divides the tokens: see Note: [Where tokens are divided]. `None` if the
            batch is divided before any module gets it.
        largest_position: Returns the largest position of the batch, while the model gets some of its rows only;
            otherwise `None`.
        of_layers: Returns the layout of a layer call from its rows and tokens, if each call of a layer is divided by
            itself; `None` if the batch is divided. See Note: [Where tokens are divided].
        documents: Where documents start in each row of the running forward, `None` if its rows are not packed. Known
            for divided tokens, and where states have to begin anew in each document.
        is_whole: Whether the running forward is not divided, although others are.
        sharers: The processes that all get the last hidden states of whole rows in the running forward; `None` if no
            others do.
    """

    def __init__(self) -> None:
        self._layout: TokenLayout | None = None
        self._documents: Documents | None = None
        self.is_whole = False
        self.sharers: dist.ProcessGroup | None = None
        self.text_model: nn.Module | None = None
        self.largest_position: Callable[[], int] | None = None
        self.of_layers: Callable[[int, int], TokenLayout] | None = None
        self._beside: CurrentLayout | None = None

    @property
    def layout(self) -> TokenLayout | None:
        return None if _whole.get() else self._layout

    @layout.setter
    def layout(self, layout: TokenLayout | None) -> None:
        self._layout = layout

    @property
    def documents(self) -> Documents | None:
        return self._documents if self.layout is None else self.layout.documents

    @contextlib.contextmanager
    def of_documents(self, documents: Documents) -> Iterator[None]:
        """Within this context, a forward that is not divided runs on packed rows."""
        before, self._documents = self._documents, documents
        try:
            yield
        finally:
            self._documents = before

    def clear(self) -> None:
        """Reset the layout when no batch is in use."""
        self.layout = self.of_layers = self.sharers = None

    @contextlib.contextmanager
    def of_layer(self, layout: TokenLayout) -> Iterator[None]:
        """Within this context, a layer runs on its tokens of this layout."""
        self.layout = layout
        try:
            yield
        finally:
            self.layout = None

    @contextlib.contextmanager
    def of_rows(self, largest_position: Callable[[], int]) -> Iterator[None]:
        """Within this context, the model gets some rows of the batch at a time, whose largest position is given."""
        self.largest_position = largest_position
        try:
            yield
        finally:
            self.largest_position = None

    def seen_by(self, module: nn.Module) -> CurrentLayout:
        """Return what a module sees: no layout, if it is beside the text model and computes what it is given."""
        text = self.text_model
        if text is None or module in set(text.modules()) or text in set(module.modules()):
            return self
        self._beside = self._beside or CurrentLayout()
        return self._beside
