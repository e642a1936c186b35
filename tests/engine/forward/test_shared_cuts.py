"""Arguments that slices of several shards cut: layers share the copies, and never see what another one has written."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_memo.engine.forward.cut_tokens import cut, is_shared_copy

TOKENS, SHARDS = 6, 2


def table() -> Tensor:
    return torch.arange(1.0 * SHARDS * TOKENS * 4).view(1, SHARDS * TOKENS, 4)


def second_half(t: Any, shards: int = SHARDS) -> Any:
    return cut(t, TOKENS, 3, TOKENS, 1, 1, shards)


def test_layers_share_copies() -> None:
    t = table()
    first, again = second_half((t, {"table": t}))[0], second_half(t)
    assert first.data_ptr() == again.data_ptr() and is_shared_copy(again.transpose(1, 2))
    assert torch.equal(first, t[:, [3, 4, 5, 9, 10, 11]])
    assert not is_shared_copy(t)


def test_a_copy_lives_as_long_as_its_argument() -> None:
    t = table()
    storage = StorageWeakRef(second_half(t).untyped_storage())
    assert not storage.expired()
    del t
    assert storage.expired()


def test_changes_of_an_argument_are_seen() -> None:
    t = table()
    before = second_half(t)
    t.mul_(2)
    assert torch.equal(second_half(t), before * 2)


def test_what_a_layer_writes_into_its_copy_stays_there() -> None:
    t = table()
    expected = second_half(t).clone()
    second_half(t).zero_()
    assert torch.equal(second_half(t), expected)


def test_only_what_autograd_may_save_is_shared() -> None:
    t, learned, whole = table(), table().requires_grad_(), table()[:, :TOKENS]
    with torch.inference_mode():
        evaluated = second_half(t)
    assert evaluated.is_inference() and not second_half(t).is_inference()
    assert second_half(learned).grad_fn is not None and not is_shared_copy(second_half(learned))
    assert second_half(whole).data_ptr() == whole[:, 3:].data_ptr()
