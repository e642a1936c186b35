"""Attention sinks: a learned score for each head that takes part in the softmax and has no value.

A sink is one more block of keys, with the score of the sink and the value 0. Merging it into the result of a kernel
gives the output and the log-sum-exp over all keys and the sink. With these two, the backward of every kernel returns
the gradients of q, k and v.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lightning_memo.kernels.attention_kernel import AttentionResult, AttentionSpec


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
