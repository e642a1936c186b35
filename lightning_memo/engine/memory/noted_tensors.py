"""Tensors that are read later than plain training reads them, and must then have the values of the earlier time.

Note: [Values that are read later]
Chunked logits, lazy embeddings, recomputations and backwards read tensors that the user holds as well, and may change
meanwhile. What takes a few bytes for each token (ids, positions, padding masks) is copied, and so are hidden states of
which no graph is built. Every other tensor is noted, and compared when it is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_ROW_BYTES = 4096


@dataclass(frozen=True, slots=True)
class NotedTensor:
    """A tensor that stays where it is, and that nothing may change until it is read.

    Attributes:
        tensor: The tensor.
        version: Counts its changes in place; 0 for an inference tensor, which does not count them.
        sums: Sums of the bytes of an inference tensor; `None` for other tensors.
    """

    tensor: Tensor
    version: int
    sums: Tensor | None

    @classmethod
    def of(cls, t: Tensor) -> NotedTensor:
        """Note a tensor with its present values."""
        return cls(t, version_of(t), byte_sums(t) if t.is_inference() else None)

    @property
    def changed(self) -> bool:
        """Whether the tensor, or a view of the same memory, was changed in place since."""
        if self.sums is not None:
            return not torch.equal(byte_sums(self.tensor), self.sums)
        return version_of(self.tensor) != self.version

    def check(self, message: str) -> None:
        """Check that the tensor has the values that it had.

        Args:
            message: Says what was changed, and what to do.

        Raises:
            RuntimeError: It was changed in place.
        """
        if self.changed:
            raise RuntimeError(message)

    def unchanged(self, layer: str) -> Tensor:
        """Return the tensor.

        Args:
            layer: Name of the layer that saved it, for the message.

        Raises:
            RuntimeError: It was changed in place since the forward.
        """
        self.check(
            f"a weight, an argument or an activation of {layer}, of shape {list(self.tensor.shape)}, was changed "
            "in place between a forward and its backward, which needs its value: change it after the backward"
        )
        return self.tensor


def version_of(t: Tensor) -> int:
    """Return how often a tensor was changed in place. Inference tensors do not count."""
    return 0 if t.is_inference() else t._version


def counter_of(t: Tensor) -> Tensor:
    """Return a tensor without bytes that counts the changes of `t`, also when `t` is gone."""
    counter = t.detach()
    counter.data = t.new_empty(0)
    return counter


def byte_sums(t: Tensor) -> Tensor:
    """Return integers that are others for other bytes, or for the same bytes in another order, almost certainly.

    The bytes are a matrix, of whose rows and columns weighted sums are taken.
    """
    data = t.detach().contiguous().view(-1).view(torch.uint8)
    complete = data.numel() // _ROW_BYTES * _ROW_BYTES
    rest = F.pad(data[complete:], (0, _ROW_BYTES - data.numel() + complete))
    words = [piece.view(torch.int32).view(-1, _ROW_BYTES // 4) for piece in (data[:complete], rest)]
    return torch.stack([_weighted(piece.sum(dim, dtype=torch.int64)) for piece in words for dim in (0, 1)])


def _weighted(t: Tensor) -> Tensor:
    return (t * (2 * torch.arange(len(t), device=t.device) + 1)).sum()
