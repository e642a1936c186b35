"""What the engine asks of an attention kernel: explicit output and log-sum-exp, and a backward that takes them.

Every back end computes one *block*: queries at absolute positions `query_start ...` against keys at `key_start ...`, so
that a slice's queries can meet the keys of the slices before it. Queries, keys and values are
`[batch, heads, tokens, head_dim]`; outputs lie in memory as `[batch, tokens, heads, head_dim]`, the layout that the
output projection reads without a copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_memo.kernels.async_transfer import to_device_async


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Which keys a query sees, and how scores are formed.

    Attributes:
        causal: A query sees keys at its own position and before.
        scale: Factor on the scores; `None` is `head_dim ** -0.5`.
        window: With `causal`, a query sees only the last `window` positions, its own included.
        dropout: Probability with which attention weights are dropped.
        lengths: Valid keys of each batch row, counted from token 0 (right padding); `None` when all are valid.
        mask: An explicit mask as `scaled_dot_product_attention` takes it, `[..., queries, keys]`.
        documents: Where packed documents start, of each batch row, the first at 0; a query sees keys of its own
            document only, beside the other rules. `None`: one document a row.
    """

    causal: bool = True
    scale: float | None = None
    window: int | None = None
    dropout: float = 0.0
    lengths: tuple[int, ...] | None = None
    mask: Tensor | None = None
    documents: tuple[tuple[int, ...], ...] | None = None

    @property
    def sliceable(self) -> bool:
        """Whether a slice's attention needs the keys of its own and earlier slices only."""
        return self.causal and self.dropout == 0.0 and self.mask is None

    def sees_nothing(self, query_start: int, key_stop: int) -> bool:
        """Whether every key before `key_stop` is outside the window of every query from `query_start` on."""
        return self.window is not None and key_stop <= query_start - self.window + 1


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """Output `[batch, heads, tokens, head_dim]`, log-sum-exp `[batch, heads, tokens]` (fp32), and kernel state.

    Queries that see no key of the block have output 0 and log-sum-exp minus infinity, so that blocks can be merged.
    """

    out: Tensor
    lse: Tensor
    state: Any = None


class AttentionBackend(Protocol):
    """One kernel. `blocks` says whether queries may begin later than keys: whether slices can be computed with it."""

    name: str
    blocks: bool

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult: ...

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        result: AttentionResult,
        spec: AttentionSpec,
        query_start: int = 0,
        key_start: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v, given the output and log-sum-exp over *all* keys."""
        ...


class Kernel(AttentionBackend, Protocol):
    """One that can be asked for by name."""

    def __init__(self) -> None: ...

    @staticmethod
    def serves(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0) -> bool:
        """Whether it computes such a call itself, rather than leave it to PyTorch's own kernel."""
        ...


def sees_nothing_result(q: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> AttentionResult:
    """The result of queries that see no key, its output in `dtype` (the queries' by default)."""
    out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=dtype).transpose(1, 2)
    return AttentionResult(out, q.new_full(q.shape[:3], -math.inf, dtype=sums_dtype(q)))


def merge(out: Tensor, lse: Tensor, part: AttentionResult) -> None:
    """Put the result for one more block of keys into that for others, in place: the online softmax.

    Args:
        out: Output for the keys so far `[batch, heads, queries, head_dim]`, in fp32 for half-precision blocks.
        lse: Their log-sum-exp `[batch, heads, queries]`.
        part: The result for the block.
    """
    # Minus infinity on both sides: no key was seen, and both outputs are 0.
    weight = torch.sigmoid(part.lse - lse).nan_to_num_(0.0)
    out.lerp_(part.out.to(out.dtype), weight[..., None])
    lse.copy_(torch.logaddexp(lse, part.lse))


def sums_dtype(t: Tensor) -> torch.dtype:
    """The dtype in which parts of `t` are added up: fp32 for half precision, where many parts meet."""
    return torch.promote_types(t.dtype, torch.float32)


def finite(lse: Tensor) -> Tensor:
    """`lse` for a backward kernel: where queries see nothing it must not meet its own minus infinity in the scores."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def token_major(t: Tensor) -> Tensor:
    """`t` `[batch, heads, tokens, head_dim]` with memory laid out as `[batch, tokens, heads, head_dim]`."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def side_by_side(t: Tensor) -> Tensor:
    """`t`, copied if the elements of a head do not lie side by side, as kernels for CUDA want them."""
    return t if t.stride(-1) == 1 else t.contiguous()


def repeat_heads(t: Tensor, groups: int) -> Tensor:
    """Keys or values of grouped-query attention, repeated to one per query head (kernels without GQA)."""
    return t if groups == 1 else t.repeat_interleave(groups, 1)


def sum_head_groups(t: Tensor, groups: int) -> Tensor:
    """The gradient of `repeat_heads`."""
    return t if groups == 1 else t.view(t.shape[0], -1, groups, *t.shape[2:]).sum(2)


def block_mask(
    spec: AttentionSpec, batch: int, queries: range, keys: range, device: torch.device, flag_with_mask: bool = True
) -> tuple[Tensor | None, bool]:
    """The boolean mask that a block needs beside its kernel's own causal flag.

    Args:
        queries: Absolute positions of the block's queries.
        keys: Absolute positions of its keys.
        flag_with_mask: Whether the kernel takes a mask and the causal flag at once.

    Returns:
        A mask `[1 or batch, 1, 1 or queries, keys]` (`True` is seen) or `None`, and whether the kernel's causal flag
        is to be set.
    """
    aligned = spec.causal and queries == keys
    windowed = spec.window is not None and queries.stop - 1 - keys.start >= spec.window
    padded = spec.lengths is not None and min(spec.lengths) < keys.stop
    flag = aligned and not windowed and (flag_with_mask or not (padded or spec.documents))
    mask: Tensor | None = None
    if (spec.causal and not flag and keys.stop - 1 > queries.start) or windowed:
        i = torch.arange(queries.start, queries.stop, device=device)[:, None]
        j = torch.arange(keys.start, keys.stop, device=device)[None, :]
        mask = (j <= i)[None, None]
        if spec.window is not None:
            mask = mask & (j > i - spec.window)
    if spec.lengths is not None and padded:
        lengths = to_device_async(torch.tensor(spec.lengths), device)[:, None]
        valid = (torch.arange(keys.start, keys.stop, device=device)[None, :] < lengths)[:, None, None, :]
        mask = valid if mask is None else mask & valid
    if spec.documents is not None:
        same = torch.stack([_same_document(starts, queries, keys, device) for starts in spec.documents])[:, None]
        mask = same if mask is None else mask & same
    return mask, flag


def _same_document(starts: tuple[int, ...], queries: range, keys: range, device: torch.device) -> Tensor:
    """Whether query and key are of one document, `[queries, keys]`."""
    edges = to_device_async(torch.tensor(starts), device)
    of_query, of_key = (
        torch.bucketize(torch.arange(r.start, r.stop, device=device), edges, right=True) for r in (queries, keys)
    )
    return of_query[:, None] == of_key[None, :]


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as CPU kernels take it: minus infinity where nothing is seen, in the queries' dtype."""
    if mask is None or mask.dtype == dtype:
        return mask
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)
