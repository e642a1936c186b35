"""Cuts the arguments of a layer into slices of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only


def cut(tree: Any, tokens: int, start: int, stop: int, batch: int, token_dim: int, shards: int = 1) -> Any:
    """Return the tokens `[start, stop)` of every tensor in `tree` that has one entry per token.

    Such tensors are `[batch or 1, tokens, ...]` (tokens first if `token_dim` is 0) or `[tokens]`. Instead of `tokens`,
    they may hold the tokens of all shards of a sequence-parallel layer, one shard after the other. Other tensors are
    returned unchanged.
    """

    def narrow(t: torch.Tensor) -> torch.Tensor:
        dim = token_dim if t.dim() >= 2 else 0
        per_token = t.dim() >= 1 and t.shape[dim] in (tokens, tokens * shards)
        if per_token and (t.dim() == 1 or t.shape[1 - token_dim] in (1, batch)):
            return take_tokens(t, dim, tokens, start, stop)
        return t

    return tree if start == 0 and stop == tokens else tree_map_only(torch.Tensor, narrow, tree)


def take_tokens(t: torch.Tensor, dim: int, tokens: int, start: int, stop: int) -> torch.Tensor:
    """Return the tokens `[start, stop)` of `t`, or of each shard if `t` holds several shards of `tokens` tokens."""
    if t.shape[dim] == tokens:
        return t.narrow(dim, start, stop - start)
    return t.unflatten(dim, (-1, tokens)).narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)
