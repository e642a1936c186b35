"""Decides which of the tensors that autograd saves are compressed in a slot (`swap_precision="fp8"`).

Note: [What stays exact]
Compressed are floating-point activations that autograd saves for a slice that is swapped. Their errors enter gradients
as factors: of products with the gradient of an output, or of the slope of an activation function. The exponential of
a recurrence's decay, which is at most 1, is off by 1 / (17 e) at most, because the decays of a sum have one sign.
Exact are

- inputs of layers, outputs of attention and of stored matrix products, and states of recurrences: recomputations start
  from them, and their results would differ from those of the forward;
- queries, keys and values: the backward of a flash kernel computes exp(query key - log-sum-exp) again, so their errors
  would be exponents, and with `host_backed`, attention reads keys and values from the host as they are;
- the log-sum-exp, and all other tensors that have few values for each token, such as statistics of norms and weights of
  experts: they have few bytes, and one of them scales a whole row;
- integers, masks and random states, parts of tensors that are made of other tensors, and functions of weights;
- all tensors of layers that run as one slice because they are not proven to keep tokens apart outside of attention: an
  attention function of their own may compute an exponential again, too.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from torch import Tensor, nn

from lightning_memo.artifacts.compressed_layout import compressed_bytes
from lightning_memo.parallel.local_tensors import local_part

LEAST_SHARE: Final = 4
"""A tensor with less than one value for so many of the layer's input has few values for each token."""


class Compression:
    """Decides which tensors of a slice are compressed.

    Args:
        layer: The layer.
        x: The slice's input, `[batch, tokens, features]`.
        tokens: Number of tokens in each sequence of the slice.
    """

    def __init__(self, layer: nn.Module, x: Tensor, tokens: int) -> None:
        self._layer, self._values = layer, x.numel()
        self._tokens = (tokens, x.numel() // x.shape[-1])

    def covers(self, t: Tensor) -> bool:
        """Return whether a tensor that autograd saves is compressed. It has one device's values."""
        if not t.is_floating_point() or t.itemsize < 2 or LEAST_SHARE * t.numel() < self._values:
            return False
        return compressed_bytes(t.numel(), t.itemsize) < t.nbytes and is_per_token(t, self._layer, self._tokens)


def is_per_token(t: Tensor, layer: nn.Module, tokens: Collection[int]) -> bool:
    """Return whether a tensor has an entry for each token.

    It has one unless all its sizes are sizes of weights (experts get any number of tokens).

    Args:
        t: The tensor.
        layer: The layer that saves it.
        tokens: Numbers of tokens, of one sequence and of all.
    """
    if any(size in tokens for size in t.shape):
        return True
    weights = [*layer.parameters(), *layer.buffers()]  # quantised ones may be either
    sizes = {1, *(size for w in weights for size in local_part(w).shape)}
    return any(size not in sizes for size in t.shape)
