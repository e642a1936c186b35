"""The attention masks of batches whose tokens are divided over processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_memo.engine.attention.mask_patterns import MaskFunction, MaskPattern, read_rules
from lightning_memo.parallel.batches.current_layout import CurrentLayout
from lightning_memo.parallel.batches.token_layout import TokenLayout, multiple
from lightning_memo.utils.user_errors import RefusedAtAnyLength


@dataclass(frozen=True, slots=True)
class WholeMask(MaskPattern):
    """A mask of all tokens of a batch, which no pattern describes. Every process has all of it.

    Attributes:
        mask: The mask, boolean `[batch, 1, tokens, tokens]`.
    """

    mask: Tensor | None = field(default=None, compare=False, repr=False)


def divided_mask(
    mask_function: MaskFunction,
    current: CurrentLayout,
    tokens: int,
    device: torch.device | str,
    may_skip: bool,
    explicit: Callable[[], Tensor],
) -> MaskPattern:
    """Return the mask of a batch whose layout knows documents and padding.

    Args:
        mask_function: A mask function of transformers.
        current: Holds the layout.
        tokens: Number of tokens that the mask is for: all of a row if the model divides them itself later.
        device: Device of the mask function's tensors.
        may_skip: Whether transformers would leave it to the attention module whether attention is causal.
        explicit: Builds the mask, boolean `[batch, 1, tokens, tokens]`.

    Raises:
        ValueError: The mask is no pattern, and a process has some of the tokens only.
    """
    rules = read_rules(mask_function, torch.arange(tokens, device=device)[None])
    if rules is not None and not rules.chunks and (rules.window is None or rules.causal):
        return MaskPattern(None if may_skip else rules.causal, rules.window)
    layout = current.layout
    assert layout is not None
    if current.text_model is None or tokens <= layout.tokens - multiple(layout.ring, layout.ulysses, layout.shards):
        raise RefusedAtAnyLength(
            "this model has an attention mask that is neither causal, nor a sliding window, nor full, which needs all "
            'tokens at once: train it with context_parallel_size=1, sequence_parallel=False and not schedule="slice"'
        )
    return _whole_mask(layout, tokens, explicit)


def _whole_mask(layout: TokenLayout, tokens: int, explicit: Callable[[], Tensor]) -> WholeMask:
    """Return a mask of all tokens of a row, padded like the row.

    Raises:
        ValueError: Keys and values are on the host, and slices would see later ones.
    """
    if layout.outside:
        raise RefusedAtAnyLength(
            "this model lets tokens see later ones, such as those of an image each other, and slices with keys on the "
            'host see earlier ones only: set host_backed="none"'
        )
    mask = F.pad(explicit(), (0, layout.tokens - tokens) * 2)
    # Tokens of the padding see themselves, because kernels do not agree on queries that see nothing.
    mask.diagonal(dim1=-2, dim2=-1)[..., tokens:] = True
    return WholeMask(None, None, mask=mask)
