"""The interface of an attention kernel: a forward that returns the log-sum-exp, and a backward that takes it.

Every kernel computes one *block*: queries at the absolute positions `query_start ...` against keys at `key_start ...`.
The queries of a slice can therefore attend to the keys of earlier slices. Queries, keys and values are
`[batch, heads, tokens, head_dim]`. Outputs are laid out in memory as `[batch, tokens, heads, head_dim]`, which the
output projection reads without a copy.

Note: [Sinks]
A sink is a learned score of a head that takes part in the softmax and has no value: one more block of keys, with this
score and the value 0. Merging it into the result of a kernel gives the output and the log-sum-exp over all keys and the
sink. With these two, the backward of every kernel returns the gradients of q, k and v.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The keys that each query sees, and the computation of the scores.

    Attributes:
        causal: Whether a query sees only keys at its own position and before.
        scale: Factor of the scores; `None` means `head_dim ** -0.5`.
        window: With `causal`, the number of positions that a query sees, including its own; `None` means all.
        dropout: Probability with which attention weights are dropped.
        lengths: Number of valid keys of each batch row (right padding); `None` if all are valid.
        mask: An explicit mask as in `scaled_dot_product_attention`, `[..., queries, keys]`.
        documents: Start positions of the packed documents of each batch row. In addition to the other rules, a query
            sees only keys of its own document. Tokens before the first document (left padding) see nothing, and nothing
            sees them. `None` means one document per row, from 0 on.
        softcap: The largest score c, by `c * tanh(score / c)` before masks; `None` means no cap.
        sinks: Learned scores `[heads]` that take part in the softmax without a value; `None` if there are none. Kernels
            ignore them: they are merged into the results, see Note: [Sinks].
        whole_mask: An explicit mask of all tokens, `[batch, 1, tokens, tokens]`, in place of all other rules. It is
            given where queries and keys are divided over processes, and kernels get their part of it as `mask`.
        shared_tokens: Where processes divide only the first tokens of a sequence, the number of these. The others are
            whole documents, of equally many tokens on each process. `None` if processes divide all, or there is one.
    """

    causal: bool = True
    scale: float | None = None
    window: int | None = None
    dropout: float = 0.0
    lengths: tuple[int, ...] | None = None
    mask: Tensor | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    whole_mask: Tensor | None = None
    shared_tokens: int | None = None

    @property
    def sliceable(self) -> bool:
        """Whether the attention of a slice needs only the keys of this slice and of earlier ones."""
        return self.causal and self.dropout == 0.0 and self.mask is None and self.whole_mask is None

    def sees_nothing(self, query_start: int, key_stop: int) -> bool:
        """Return whether all keys before `key_stop` are outside the windows of all queries from `query_start` on."""
        return self.window is not None and key_stop <= query_start - self.window + 1


@dataclass(frozen=True, slots=True)
class AttentionResult:
    """The result of an attention kernel.

    Queries that see no key of the block have output 0 and log-sum-exp minus infinity, so that blocks can be merged.

    Attributes:
        out: Output, `[batch, heads, tokens, head_dim]`.
        lse: Log-sum-exp of the scores, fp32 `[batch, heads, tokens]`.
        state: Kernel state that the backward needs, for example the random state of dropout.
    """

    out: Tensor
    lse: Tensor
    state: Any = None


class AttentionBackend(Protocol):
    """An attention kernel.

    Attributes:
        name: Name of the kernel.
        blocks: Whether queries may begin at a later position than keys, which slices need.
    """

    name: str
    blocks: bool

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
    ) -> AttentionResult:
        """Compute the attention of one block.

        Args:
            q: Queries, `[batch, heads, queries, head_dim]`.
            k: Keys, `[batch, key heads, keys, head_dim]`.
            v: Values, with the shape of the keys.
            spec: The keys that each query sees.
            query_start: Absolute position of the first query.
            key_start: Absolute position of the first key.
        """
        ...

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
        """Return the gradients of q, k and v of one block.

        `result` has the output and the log-sum-exp over *all* keys that the queries see, and the state of this block.
        """
        ...


class Kernel(AttentionBackend, Protocol):
    """An attention kernel that a user can select by name."""

    def __init__(self) -> None: ...

    @staticmethod
    def serves(q: Tensor, k: Tensor, spec: AttentionSpec, query_start: int = 0, key_start: int = 0) -> bool:
        """Return whether the kernel computes such a call itself instead of passing it on to PyTorch's own kernel."""
        ...


def sees_nothing_result(q: Tensor, v: Tensor, dtype: torch.dtype | None = None) -> AttentionResult:
    """Return the result of queries that see no key, with an output of type `dtype` (by default that of the queries)."""
    out = q.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3], dtype=dtype).transpose(1, 2)
    return AttentionResult(out, q.new_full(q.shape[:3], -math.inf, dtype=sums_dtype(q)))


def merge(out: Tensor, lse: Tensor, part: AttentionResult) -> None:
    """Merge the result for another block of keys into `out` and `lse`, in place, by online softmax.

    Args:
        out: Output for the keys so far, `[batch, heads, queries, head_dim]`; in fp32 for half-precision blocks.
        lse: Log-sum-exp for the keys so far, `[batch, heads, queries]`.
        part: The result for the other block.
    """
    # Where both are minus infinity, no key was seen and both outputs are 0.
    weight = torch.sigmoid(part.lse - lse).nan_to_num_(0.0)
    out.lerp_(part.out.to(out.dtype), weight[..., None])
    lse.copy_(torch.logaddexp(lse, part.lse))


def sums_dtype(t: Tensor) -> torch.dtype:
    """Return the dtype in which contributions of the type of `t` are summed: fp32 for half precision."""
    return torch.promote_types(t.dtype, torch.float32)


def finite(lse: Tensor) -> Tensor:
    """Replace minus infinity in `lse` by 0, so that a backward kernel does not subtract it from infinite scores."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def token_major(t: Tensor) -> Tensor:
    """Return `t` `[batch, heads, tokens, head_dim]` with the memory layout `[batch, tokens, heads, head_dim]`."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def side_by_side(t: Tensor) -> Tensor:
    """Return `t`, copied if its last dimension is not contiguous, which CUDA kernels require."""
    return t if t.stride(-1) == 1 else t.contiguous()


def repeat_heads(t: Tensor, groups: int) -> Tensor:
    """Repeat the heads of keys or values, for kernels without grouped-query attention."""
    return t if groups == 1 else t.repeat_interleave(groups, 1)


def sum_head_groups(t: Tensor, groups: int) -> Tensor:
    """Return the gradient of `repeat_heads`: the sum over the repetitions of each head."""
    return t if groups == 1 else t.view(t.shape[0], -1, groups, *t.shape[2:]).sum(2)


def block_mask(
    spec: AttentionSpec, batch: int, queries: range, keys: range, device: torch.device, flag_with_mask: bool = True
) -> tuple[Tensor | None, bool]:
    """Return the boolean mask and the causal flag with which a kernel computes a block.

    Args:
        spec: The keys that each query sees.
        batch: Number of batch rows.
        queries: Absolute positions of the block's queries.
        keys: Absolute positions of the block's keys.
        device: Device of the mask.
        flag_with_mask: Whether the kernel accepts a mask together with the causal flag.

    Returns:
        A mask `[1 or batch, 1, 1 or queries, keys]`, in which `True` means seen, or `None` if none is needed, and the
        kernel's causal flag.
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
    """Return whether query and key belong to the same document, `[queries, keys]`."""
    edges = to_device_async(torch.tensor(starts), device)
    of_query, of_key = (
        torch.bucketize(torch.arange(r.start, r.stop, device=device), edges, right=True) for r in (queries, keys)
    )
    return (of_query[:, None] == of_key[None, :]) & (of_key > 0)


def additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Convert a mask for CPU kernels: minus infinity where a key is not seen, in the dtype of the queries."""
    if mask is None or mask.dtype == dtype:
        return mask
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)


def to_device_async(t: Tensor, device: torch.device) -> Tensor:
    """Copy `t` to the device without making the host wait for the device's pending work.

    A copy from pageable memory would wait for the stream, and so would one from memory with gaps, of which PyTorch
    makes a pageable copy first. PyTorch keeps page-locked memory until its copies have ended.
    """
    if device.type != "cuda" or t.device.type != "cpu":
        return t.to(device)
    return t.contiguous().pin_memory().to(device, non_blocking=True)


def merge_sinks(result: AttentionResult, sinks: Tensor | None) -> AttentionResult:
    """Merge the sinks of each head, `[heads]`, into a result for all keys; without sinks, return the result."""
    if sinks is None:
        return result
    scores = sinks.detach().to(result.lse.dtype)[:, None]
    weight = torch.sigmoid(result.lse - scores)
    out = (result.out * weight[..., None]).to(result.out.dtype)
    return replace(result, out=out, lse=torch.logaddexp(result.lse, scores))


def gradient_of_sinks(dout: Tensor, result: AttentionResult, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, `[heads]`.

    Args:
        dout: Gradient of the output, `[batch, heads, tokens, head_dim]`.
        result: The result of `merge_sinks`.
        sinks: Scores of the sinks.
    """
    weight = torch.exp(sinks.detach().to(result.lse.dtype)[:, None] - result.lse)
    products = (dout.to(result.lse.dtype) * result.out).sum(-1)
    return -(weight * products).sum((0, 2)).to(sinks.dtype)


def detached(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec without the history of the sinks, which a layer that keeps it would keep alive."""
    return spec if spec.sinks is None else replace(spec, sinks=spec.sinks.detach())
