"""Sums of what a forward saves, which show whether a recomputation computes the same."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_memo.engine.saved_tensors.wrapper_subclasses import plain_parts

_EVERY = 4  # tensors, so that a step that is checked takes little longer
# Kernels may add in any order: of the norm of the tensor.
_TOLERANCE = 1e-5
_HALF_TOLERANCE = 4e-3


class SavedSums:
    """Sums of a part of the tensors that a slice saves in its forward.

    If values change, their sum changes about as much as the norm of the difference. It takes next to no memory.

    Args:
        turn: Number of the part; `None` for all tensors.

    Note: [Check of recomputed values]
    A forward may read what is not restored: variables of modules, classes and functions, files, other libraries'
    generators. If these are others in the backward, a recomputation computes something else, without any other sign.
    """

    def __init__(self, turn: int | None) -> None:
        self._turn = turn
        self._sums: dict[int, list[Tensor]] = {}

    def note(self, number: int, t: Tensor) -> None:
        """Note the sum of a tensor in the forward.

        Args:
            number: Number of the tensor among those that the slice saves.
            t: The tensor.
        """
        if self._turn is None or (number + self._turn) % _EVERY == 0:
            self._sums[number] = [_sum(part) for part in _parts(t)]

    def note_attention(self, call: int, *qkv: Tensor) -> None:
        """Note the sums of queries, keys and values of an attention call, which is not recomputed.

        Args:
            call: Number of the call in the slice.
            qkv: The tensors.
        """
        for n, t in enumerate(qkv):
            self.note(_before_all(call, n), t)

    def attention_alike(self, call: int, *qkv: Tensor) -> bool:
        """Return whether recomputed queries, keys and values are those of the forward."""
        return all(self.alike(_before_all(call, n), t) for n, t in enumerate(qkv))

    def alike(self, number: int, t: Tensor) -> bool:
        """Return whether a recomputed tensor is the one of the forward. The host waits for the device."""
        before = self._sums.pop(number, None)
        return before is None or all(map(_alike, before, _parts(t)))


def _before_all(call: int, n: int) -> int:
    return -1 - 3 * call - n  # saved tensors have the numbers from 0 on


def _parts(t: Tensor) -> list[Tensor]:
    # Other values of a byte are scaled by further parts, or the bytes of a workspace, of which some have no meaning.
    return [part.detach() for part in plain_parts(t) if part.itemsize > 1 or part.dtype is torch.bool]


def _sum(t: Tensor) -> Tensor:
    if t.itemsize == 1:
        return t.count_nonzero()
    if t.is_complex():
        t = torch.view_as_real(t)
    # Without a copy of the tensor: the CPU would make one for another dtype.
    return t.sum(dtype=torch.float32) if t.is_cuda and t.is_floating_point() and t.itemsize < 4 else t.sum()


def _alike(before: Tensor, t: Tensor) -> bool:
    now = _sum(t)
    if torch.equal(now, before) or not (now.isfinite() or before.isfinite()):
        return True
    if not (t.is_floating_point() and now.isfinite() and before.isfinite()):
        return False
    tolerance = _TOLERANCE if t.itemsize >= 4 else _HALF_TOLERANCE
    return float((now - before).abs()) <= tolerance * float(torch.linalg.vector_norm(t))
