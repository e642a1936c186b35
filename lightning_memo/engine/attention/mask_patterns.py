"""Describes the attention mask of a Hugging Face model by a pattern, if there is one that holds for all tokens.

The mask of a batch whose tokens are divided over processes has to be a pattern, or is one that every process has whole.

Note: [How masks are understood]
transformers describes a mask by a function of a query and a key. Functions that transformers itself makes are read:
their code objects say which rule they compute, and their closures hold its numbers and tensors. All other functions are
evaluated on all pairs of a query and a key, some queries at a time. Neither way relies on samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from lightning_memo.kernels import AttentionSpec
from lightning_memo.kernels.attention_kernel import block_mask
from lightning_memo.parallel.batches.token_layout import (
    CurrentLayout,
    Documents,
    TokenLayout,
    first_and_count,
    multiple,
)
from lightning_memo.utils.user_errors import RefusedAtAnyLength

_PAIRS = 1 << 22  # pairs of a query and a key that are evaluated at a time
_EVERYTHING = [slice(None), slice(0, None)]
MaskFunction = Callable[..., Any]


class AllTokensNeeded(RefusedAtAnyLength):
    """A module needs the tokens of all processes."""


@dataclass(frozen=True, slots=True)
class MaskPattern:
    """Description of a model's mask, in place of the mask `[tokens, tokens]`, which is too large to build.

    Attributes:
        causal: Whether queries see no later key; `None` if the attention module decides.
        window: Number of positions that a query sees, including its own; `None` means all.
        lengths: Number of tokens of each batch row before the padding on the right; `None` means all.
        documents: Start positions of the packed documents of each batch row. Attention does not cross document
            boundaries. Tokens before the first document see nothing (padding on the left).
        explicit: Builds the mask for models that compute attention themselves; `None` if no model does.
        of_all_tokens: Builds the mask that plain training has, where a process has some of the tokens only.
    """

    causal: bool | None
    window: int | None
    lengths: tuple[int, ...] | None = None
    documents: Documents | None = None
    explicit: Callable[[], Tensor] | None = field(default=None, compare=False, repr=False)
    of_all_tokens: Callable[[], Tensor | None] | None = field(default=None, compare=False, repr=False)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute with the explicit mask: the model adds the mask to its scores itself."""
        built, named = tree_map_only(MaskPattern, MaskPattern.tensor, (args, kwargs or {}))
        return func(*built, **named)

    def __getitem__(self, index: Any) -> Any:
        """Index the explicit mask. Slices of everything leave the pattern as it is: Gemma 4 takes `[:, :, -0:, :]`."""
        if isinstance(index, tuple) and all(isinstance(each, slice) and each in _EVERYTHING for each in index):
            return self
        return self.tensor()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def tensor(self) -> Tensor:
        """Build the mask, `[batch, 1, tokens, tokens]`.

        Raises:
            ValueError: Other processes have some of the tokens.
        """
        assert self.explicit is not None
        return self.explicit()

    def plain(self) -> Tensor | None:
        """Return the mask of all tokens of a row, as plain training has it; `None` if it has none."""
        return self.tensor() if self.of_all_tokens is None else self.of_all_tokens()

    def padded(self, valid: Sequence[tuple[int, int]], tokens: int, may_see_nothing: bool = True) -> MaskPattern | None:
        """Return the pattern in which only valid tokens are keys; `None` if there is none.

        Args:
            valid: First and end of the valid tokens of each batch row.
            tokens: Number of tokens of a row.
            may_see_nothing: Whether the output of a query that sees no key is 0.
        """
        starts, stops = zip(*valid, strict=True)
        documents = self.documents
        if any(starts):
            if not (self.causal and may_see_nothing):
                return None
            rows = documents or ((0,),) * len(starts)
            documents = tuple((first, *(n for n in row if n > first)) for first, row in zip(starts, rows, strict=True))
        return replace(self, documents=documents, lengths=stops if min(stops) < tokens else None)


@dataclass(frozen=True, slots=True)
class WholeMask(MaskPattern):
    """A mask of all tokens of a batch, which no pattern describes. Every process has all of it.

    Attributes:
        mask: The mask, boolean `[batch, 1, tokens, tokens]`.
    """

    mask: Tensor | None = field(default=None, compare=False, repr=False)


def read_rules(mask_function: MaskFunction, positions: Tensor) -> _MaskRules | None:
    """Return the rules that a mask function of transformers computes; `None` if it is not known or combines others.

    Args:
        mask_function: Function of batch row, head, query and key.
        positions: Positions of the tokens, `[batch or 1, tokens]`.
    """
    code = getattr(mask_function, "__code__", None)
    make = next((make for known, make in _readers() if known is code), None)
    if make is None:
        return None
    cells = getattr(mask_function, "__closure__", None) or ()
    return make(positions, *(cell.cell_contents for cell in cells))


@dataclass(frozen=True, slots=True)
class _MaskRules:
    """The rules that a mask function of transformers combines; a query sees the keys that all of them allow.

    Attributes:
        causal: Whether queries see no later key.
        window: Number of positions, including its own, to which a query looks back; `None` means all.
        groups: Numbers of tokens, `[batch or 1, tokens]`: a query sees keys with its own number.
        chunks: Numbers of tokens, `[batch or 1, tokens]`, with the same meaning; chunks have a fixed length.
        positions: Positions, `[batch or 1, tokens]`, for which the rules hold instead of token numbers.
    """

    causal: bool = False
    window: int | None = None
    groups: tuple[Tensor, ...] = ()
    chunks: tuple[Tensor, ...] = ()
    positions: tuple[Tensor, ...] = ()

    def both(self, other: _MaskRules) -> _MaskRules:
        windows = [w for w in (self.window, other.window) if w is not None]
        return _MaskRules(
            self.causal or other.causal,
            min(windows, default=None),
            self.groups + other.groups,
            self.chunks + other.chunks,
            self.positions + other.positions,
        )

    def pattern(self, batch: int, tokens: int) -> MaskPattern | None:
        """Return the pattern of the rules for `batch` rows of `tokens` tokens; `None` if there is none."""
        window = None if self.window is None or (self.causal and self.window >= tokens) else self.window
        if window is not None and (not self.causal or window < 1):
            return None
        tensors = self.groups + self.chunks + self.positions
        if not tensors:
            return MaskPattern(self.causal, window)
        # Groups that rise, and positions that count up within them, make every group and chunk a run of tokens.
        edges = torch.zeros((batch, tokens - 1), dtype=torch.bool, device=tensors[0].device)
        rising = torch.ones_like(edges)
        for t in self.groups:
            edges, rising = edges | (t.diff() != 0), rising & (t.diff() >= 0)
        for t in self.positions:
            rising &= edges | (t.diff() == 1)
        for t in self.chunks:
            rising &= edges | (t.diff() >= 0)
        for t in self.chunks:
            edges = edges | (t.diff() != 0)
        found = torch.cat([rising.all(1, keepdim=True), edges], 1).cpu()  # the host waits once for all
        return MaskPattern(self.causal, window, documents=_documents(found[:, 1:])) if found[:, 0].all() else None


@functools.cache
def _readers() -> tuple[tuple[CodeType, Callable[..., _MaskRules | None]], ...]:
    """Return the code objects of transformers' mask functions, each with a function of positions and closure values.

    Closure values are in the order of their names.
    """
    from transformers import masking_utils as masks

    causal: Any = masks.causal_mask_function
    unused = torch.zeros(0)
    known: tuple[tuple[Any, Callable[..., _MaskRules | None]], ...] = (
        (causal, lambda positions: _MaskRules(causal=True)),
        (masks.bidirectional_mask_function, lambda positions: _MaskRules()),
        (masks.sliding_window_overlay(1), lambda positions, window: _MaskRules(window=window)),
        (masks.chunked_overlay(1, unused), _read_chunks),
        (masks.packed_sequence_mask_function(unused), lambda positions, groups: _MaskRules(groups=(groups,))),
        (masks.and_masks(causal), _read_intersection),
        (masks.or_masks(causal), _read_union),
    )
    remap = getattr(masks, "remap_positions_for_packed_sequence", None)  # since transformers 5.23
    remapped = () if remap is None else ((remap(causal, unused), _read_remapped),)
    return tuple((function.__code__, make) for function, make in (*known, *remapped))


def _read_chunks(positions: Tensor, size: int, left_padding: Tensor) -> _MaskRules:
    return _MaskRules(chunks=((positions - left_padding[:, None]) // size,))


def _read_remapped(positions: Tensor, mask_function: MaskFunction, own: Tensor) -> _MaskRules | None:
    rules = read_rules(mask_function, own)
    if rules is None or rules.groups or rules.positions:  # these would be looked up by position
        return None
    return replace(rules, positions=(own,))


def _read_intersection(positions: Tensor, functions: Sequence[MaskFunction]) -> _MaskRules | None:
    every = [read_rules(function, positions) for function in functions]
    rules = [each for each in every if each is not None]
    return functools.reduce(_MaskRules.both, rules, _MaskRules()) if len(rules) == len(every) else None


def _read_union(positions: Tensor, functions: Sequence[MaskFunction]) -> _MaskRules | None:
    """Return the rules of the only function that allows anything: batches without images have no blocks of images."""
    rest = [function for function in functions if not _allows_nothing(function)]
    return read_rules(rest[0], positions) if len(rest) == 1 else None


def _allows_nothing(mask_function: MaskFunction) -> bool:
    """Return whether a function is transformers' overlay of blocks, and no token is in a block."""
    from transformers import masking_utils

    blockwise = getattr(masking_utils, "blockwise_overlay", None)  # not in all supported versions of transformers
    if blockwise is None or getattr(mask_function, "__code__", None) is not blockwise(torch.zeros(0)).__code__:
        return False
    cells = mask_function.__closure__  # type: ignore[attr-defined]
    return bool((cells[0].cell_contents < 0).all())


def measure_pattern(seen_by: Callable[[int, int], Tensor], tokens: int) -> MaskPattern | None:
    """Return the pattern of a mask, found from all pairs of a query and a key; `None` if there is none.

    Args:
        seen_by: Returns which keys the queries from a first one on see, `[batch, 1, queries, tokens]`. Its arguments
            are the first query and the number of queries.
        tokens: Number of queries and of keys.
    """
    lows, highs = [], []
    start, rows = 0, 1  # the first query tells the batch size
    while start < tokens:
        seen = seen_by(start, rows)[:, 0].bool()
        first, count = first_and_count(seen)
        if (count == 0).any():  # the keys that a query sees do not follow one another, or there are none
            return None
        lows.append(first)
        highs.append(first + count - 1)
        start += rows
        rows = min(max(1, _PAIRS // seen[:, 0].numel()), tokens - start)
    low, high = torch.cat(lows, 1), torch.cat(highs, 1)  # these describe the mask completely
    keys = torch.arange(tokens, device=low.device)
    first = low == keys
    begin = torch.where(first, keys, 0).cummax(1).values
    causal = bool((high == keys).all())
    window: int | None = None
    if causal:
        longest = int((keys - low).max()) + 1
        window = None if torch.equal(low, begin) else longest
        fits = torch.equal(low, torch.maximum(begin, keys - longest + 1))
    else:
        ends = torch.where(first, keys, tokens).roll(-1, 1)
        ends[:, -1] = tokens
        fits = torch.equal(low, begin) and torch.equal(high, ends.flip(1).cummin(1).values.flip(1) - 1)
    return MaskPattern(causal, window, documents=_documents(first[:, 1:].cpu())) if fits else None


def _documents(edges: Tensor) -> Documents | None:
    """Return the starts of documents; `None` if there is one document per row.

    Args:
        edges: Whether a document starts at the second and each later token, `[batch, tokens - 1]`.
    """
    return tuple((0, *(row.nonzero()[:, 0] + 1).tolist()) for row in edges) if bool(edges.any()) else None


def sharded_mask(
    mask_function: MaskFunction,
    current: CurrentLayout,
    rows: int,
    tokens: int,
    device: torch.device | str,
    may_skip: bool,
    explicit: Callable[[], Tensor],
    added: torch.dtype | None,
) -> MaskPattern:
    """Return the mask of a batch whose layout knows documents and padding.

    Args:
        mask_function: A mask function of transformers.
        current: Holds the layout.
        rows: Number of rows of the batch.
        tokens: Number of tokens that the mask is for: all of a row if the model divides them itself later.
        device: Device of the mask function's tensors.
        may_skip: Whether transformers would leave it to the attention module whether attention is causal.
        explicit: Builds the mask, boolean `[batch, 1, tokens, tokens]`.
        added: Dtype of the mask that plain training adds to scores; `None` if it has a boolean one.

    Raises:
        ValueError: The mask is no pattern, and a process has some of the tokens only.
    """
    layout = current.layout
    assert layout is not None
    rules = read_rules(mask_function, torch.arange(tokens, device=device)[None])
    if rules is not None and not rules.chunks and (rules.window is None or rules.causal):
        build = functools.partial(_mask_of_all_tokens, rules, rows, layout, device, may_skip, added)
        causal = None if may_skip else rules.causal
        return MaskPattern(causal, rules.window, explicit=refuse_explicit(layout), of_all_tokens=build)
    if current.text_model is None or tokens <= layout.tokens - multiple(layout.ring, layout.ulysses, layout.shards):
        raise AllTokensNeeded(
            "this model has an attention mask that is neither causal, nor a sliding window, nor full, which needs "
            f"all tokens at once: train it with {layout.how_to_compute_all}"
        )
    return whole_mask(layout, explicit(), added)


def _mask_of_all_tokens(
    rules: _MaskRules,
    rows: int,
    layout: TokenLayout,
    device: torch.device | str,
    may_skip: bool,
    added: torch.dtype | None,
) -> Tensor | None:
    """Return the mask of a pattern for all tokens of a row, `[rows, 1, tokens, tokens]`; `None` if none is needed."""
    tokens, rows, batch = layout.row_tokens, layout.rows_of_batch(rows), layout.placement or layout
    spec = AttentionSpec(rules.causal, None, rules.window, 0.0, batch.lengths, documents=batch.documents)
    padded = spec.lengths is not None and min(spec.lengths) < tokens
    if may_skip and not padded and spec.documents is None:
        return None
    everything = range(tokens)
    mask, causal = block_mask(spec, rows, everything, everything, torch.device(device), flag_with_mask=False)
    if mask is None:
        mask = torch.ones((1, 1, tokens, tokens), dtype=torch.bool, device=device)
        mask = mask.tril() if causal else mask
    return _as_added(mask.expand(rows, 1, tokens, tokens), added)


def _as_added(mask: Tensor, added: torch.dtype | None) -> Tensor:
    if added is None:
        return mask
    return torch.zeros(mask.shape, dtype=added, device=mask.device).masked_fill_(~mask, torch.finfo(added).min)


def whole_mask(layout: TokenLayout, mask: Tensor, added: torch.dtype | None = None) -> WholeMask:
    """Return a mask of all tokens of a row, padded like the row.

    Args:
        layout: Where the tokens of the batch are.
        mask: The mask, boolean or added to scores, `[batch, 1, tokens, tokens]`.
        added: Dtype of the mask that plain training adds to scores; `None` if it has this one.

    Raises:
        ValueError: Keys and values are on the host, and slices would see later ones.
    """
    if layout.global_slices:
        raise RefusedAtAnyLength(
            "this model lets tokens see later ones, such as those of an image each other, and slices with keys on the "
            'host see earlier ones only: set stream_from_host="none"'
        )
    tokens = mask.shape[-1]
    hidden, seen = (torch.finfo(mask.dtype).min, 0.0) if mask.is_floating_point() else (False, True)
    padded = F.pad(mask, (0, layout.tokens - tokens) * 2, value=hidden)
    # Tokens of the padding see themselves, because kernels do not agree on queries that see nothing.
    padded.diagonal(dim1=-2, dim2=-1)[..., tokens:] = seen
    of_all_tokens = functools.partial(_as_added, mask, added)
    return WholeMask(None, None, explicit=refuse_explicit(layout), mask=padded, of_all_tokens=of_all_tokens)


def refuse_explicit(layout: TokenLayout) -> Callable[[], Tensor]:
    """Return the function that a mask has in place of one that builds it where a process has some of the tokens."""

    def refuse() -> Tensor:
        raise AllTokensNeeded(
            "the model computes attention itself, as models with ALiBi and some older models do, and needs an "
            f"attention mask of tokens by tokens, which is not built: train it with {layout.how_to_compute_all}"
        )

    return refuse
