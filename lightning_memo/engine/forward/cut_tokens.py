"""Cuts the arguments of a layer into slices of tokens."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_memo.engine.memory.offloaded_tensor import part_of
from lightning_memo.engine.memory.saved_storages import version_of

_shared: Final[Any] = WeakTensorKeyDictionary()
"""Copies by the argument of which they are parts, and its version then; see `_share`."""
_storages: Final[dict[int, StorageWeakRef]] = {}
"""Storages of these copies by address, which is another one's as soon as a copy is freed."""


def cut(tree: Any, tokens: int, start: int, stop: int, batch: int, token_dim: int, shards: int = 1) -> Any:
    """Return the tokens `[start, stop)` of every tensor in `tree` that has one entry per token.

    Other tensors are returned unchanged; see `token_dim_of`.
    """

    def narrow(t: torch.Tensor) -> torch.Tensor:
        dim = token_dim_of(t, tokens, batch, token_dim, shards)
        if dim is None:
            return t
        may_be_saved = torch.is_grad_enabled() and type(t) is torch.Tensor and not (t.requires_grad or t.is_inference())
        take = _share if t.shape[dim] != tokens and may_be_saved else take_tokens
        return take(t, dim, tokens, start, stop)

    return tree if start == 0 and stop == tokens else tree_map_only(torch.Tensor, narrow, tree)


def _share(t: torch.Tensor, dim: int, tokens: int, start: int, stop: int) -> torch.Tensor:
    """Return tokens of several shards, which are no view of `t`: the layers share the copy, as they share `t`.

    A copy that a layer has changed in place is not shared any more.
    """
    copies, key = _shared.setdefault(t, {}), (dim, tokens, start, stop)
    version, copy = copies.get(key, (None, None))
    if version != version_of(t) or version_of(copy):
        copy = take_tokens(t, *key)
        copies[key] = version_of(t), copy
        for gone in [address for address, storage in _storages.items() if storage.expired()]:
            del _storages[gone]
        _storages[copy.untyped_storage()._cdata] = StorageWeakRef(copy.untyped_storage())
    return copy


def is_shared_copy(t: torch.Tensor) -> bool:
    """Return whether `t` lies in a copy of an argument's tokens that layers share."""
    storage = _storages.get(t.untyped_storage()._cdata) if _storages and type(t) is torch.Tensor else None
    return storage is not None and not storage.expired()


def token_dim_of(t: torch.Tensor, tokens: int, batch: int, token_dim: int, shards: int = 1) -> int | None:
    """Return the dimension of an argument of a layer that has one entry per token; `None` if there is none.

    Such arguments are `[batch or 1, tokens, ...]` (tokens first if `token_dim` is 0), `[tokens]`, or `[tokens, ...]`
    without a batch dimension, or, whatever `token_dim` is, `[batch or 1, heads or 1, tokens, head_dim]`. Instead of
    `tokens`, they may hold the tokens of all shards of a sequence-parallel layer, one shard after the other.
    """
    by_token = (tokens, tokens * shards)
    if t.dim() >= 2 and t.shape[token_dim] in by_token and t.shape[1 - token_dim] in (1, batch):
        return token_dim
    # If its last dimension is one of tokens, too, it is a mask.
    if t.dim() == 4 and t.shape[0] in (1, batch) and [n in by_token for n in t.shape[1:]] == [False, True, False]:
        return 2
    if t.dim() == 0 or t.shape[0] not in by_token:
        return None
    # A matrix of tokens by tokens is a mask, and the first dimension may be that of the batch.
    return 0 if t.dim() == 1 or (batch not in by_token and not set(by_token) & set(t.shape[1:])) else None


def take_tokens(t: torch.Tensor, dim: int, tokens: int, start: int, stop: int) -> torch.Tensor:
    """Return the tokens `[start, stop)` of `t`, or of each shard if `t` holds several shards of `tokens` tokens."""
    if t.shape[dim] == tokens:
        return part_of(t, dim, start, stop)
    return t.unflatten(dim, (-1, tokens)).narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)
