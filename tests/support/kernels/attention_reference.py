"""Attention in fp64 by its definition, as a reference for kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_memo.kernels import AttentionBackend, AttentionSpec


class Inputs(NamedTuple):
    """q, k, v and the gradient of the output, `[batch, heads, tokens, head_dim]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Attended(NamedTuple):
    """The output, the log-sum-exp, and the gradients of q, k and v."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def make_inputs(
    batch: int = 2,
    heads: int = 4,
    key_heads: int = 4,
    queries: int = 24,
    keys: int = 24,
    head: int = 8,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
) -> Inputs:
    """Return normally distributed tensors in the memory layout of projections, `[batch, tokens, heads, head_dim]`."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(queries, heads), (keys, key_heads), (keys, key_heads), (queries, heads)]
    tensors = [torch.randn(batch, tokens, n, head, generator=generator, dtype=torch.float64) for tokens, n in shapes]
    return Inputs(*(t.to(device, dtype).transpose(1, 2) for t in tensors))


def visible(spec: AttentionSpec, batch: int, queries: range, keys: range) -> Tensor:
    """Return the mask of the keys that each query sees, bool `[batch, 1, queries, keys]`."""
    i, j = torch.tensor(list(queries))[:, None], torch.tensor(list(keys))[None, :]
    seen = torch.ones(batch, len(queries), len(keys), dtype=torch.bool)
    if spec.causal:
        seen &= j <= i
    if spec.window is not None:
        seen &= i - j < spec.window
    if spec.lengths is not None:
        seen &= j < torch.tensor(spec.lengths)[:, None, None]
    for row, starts in enumerate(spec.documents or ()):
        of_query, of_key = (sum((positions >= start).int() for start in starts) for positions in (i, j))
        seen[row] &= (of_query == of_key) & (of_key > 0)  # nothing sees what is before the first document
    return seen[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp: zero and minus infinity for queries that see no key."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - torch.where(seen.any(-1), lse, torch.zeros_like(lse))[..., None])
    return weights @ v, lse


def reference(inputs: Inputs, spec: AttentionSpec, query_start: int = 0, key_start: int = 0) -> Attended:
    """Return attention and gradients of a block in fp64 on the CPU."""
    q, k, v = (t.detach().to("cpu", torch.float64).requires_grad_() for t in inputs[:3])
    queries, keys = range(query_start, query_start + q.shape[2]), range(key_start, key_start + k.shape[2])
    out, lse = attention(q, k, v, visible(spec, q.shape[0], queries, keys), spec.scale)
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout.to("cpu", torch.float64))
    return Attended(out.detach(), lse.detach(), *grads)


def attend(
    backend: AttentionBackend, inputs: Inputs, spec: AttentionSpec, query_start: int = 0, key_start: int = 0
) -> Attended:
    """Return attention and gradients as a back end computes them."""
    q, k, v, dout = inputs
    result = backend.forward(q, k, v, spec, query_start, key_start)
    grads = backend.backward(dout, q, k, v, result, spec, query_start, key_start)
    return Attended(result.out, result.lse, *grads)


def errors(found: Attended, expected: Attended) -> dict[str, float]:
    """Return the relative error of each tensor, by norms.

    Gradients of q and k vanish where a query sees one key. Their norms count as at least a tenth of all gradients.
    """
    gradients = float(sum(g.norm() ** 2 for g in expected[2:]) ** 0.5)
    result = {}
    for name, mine, truth in zip(Attended._fields, found, expected, strict=True):
        mine = mine.cpu().double()
        if name == "lse":
            assert torch.equal(mine == -torch.inf, truth == -torch.inf)  # the queries that see no key
            mine, truth = (t[truth != -torch.inf] for t in (mine, truth))
        norm = max(float(truth.norm()), gradients / 10 if name.startswith("d") else 0.0, 1e-30)
        result[name] = float((mine - truth).norm()) / norm
    return result


def assert_close(found: Attended, expected: Attended, bound: float) -> None:
    wrong = {name: error for name, error in errors(found, expected).items() if not error <= bound}
    assert not wrong, f"relative errors over {bound}: {wrong}"
