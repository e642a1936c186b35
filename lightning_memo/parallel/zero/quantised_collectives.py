"""Weights and gradients of ZeRO that are sent as integers of 8 or 4 bits, in blocks with a scale each (ZeRO++).

Note: [Error of what is sent]
Let a be the largest magnitude in a block of 128 values. Each of them arrives within a / 254 with 8 bits, and within
a / 14 with 4 bits. All ranks compute with the same weights, those that have arrived. A gradient is the sum of this
rank's exact part and of the parts that have arrived, added in fp32: of W ranks, the error is at most that of W - 1
parts. A block with a NaN or an infinity arrives as values that are not finite.

Neighbours that hold shards of gathered weights between forward and backward send each other exact values: these have
been rounded before. Rounded again in other blocks, the weights of the backward would not be those of the forward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from lightning_memo.artifacts.slot_layouts import BLOCK
from lightning_memo.parallel.zero.fsdp_units import parameter_groups
from lightning_memo.parallel.zero.quantised_bytes import GRADIENT_BITS, SCALE_BYTES, WEIGHT_BITS, sent_bytes

# Newer versions of PyTorch have another name for it, and warn of the old one.
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def send_quantised(unit: FSDPModule, communication: str) -> None:
    """Send the weights of an FSDP2 unit with 8 bits, and their gradients with 8 or 4 bits.

    Weights that have several dtypes are sent as they are.

    Args:
        unit: The unit.
        communication: "int8" or "int4", for gradients.
    """
    ranks = max((group.mesh_info.shard_mesh_size for group in parameter_groups(unit._get_fsdp_state())), default=1)
    unit.set_custom_all_gather(QuantisedAllGather(ranks))
    unit.set_custom_reduce_scatter(QuantisedReduceScatter(GRADIENT_BITS[communication]))


class Quantised:
    """Values as integers of 8 or 4 bits in blocks.

    Args:
        sent: Bytes, `[sent_bytes(values, bits)]`: the integers of all blocks, and then their scales in fp32.
        values: Number of values.
        bits: 8 or 4.
    """

    def __init__(self, sent: Tensor, values: int, bits: int) -> None:
        self._values = values
        self._bits = bits
        blocks = -(-values // BLOCK)
        integers, scales = sent.split([blocks * BLOCK * bits // 8, blocks * SCALE_BYTES])
        self._integers = integers.view(torch.int8).view(blocks, -1)
        self._scales = scales.view(torch.float32)[:, None]

    def write(self, t: Tensor) -> None:
        """Write values, `[values]`."""
        first = 0
        for part in value_blocks(t):
            rows = slice(first, first + len(part))
            scales = torch.linalg.vector_norm(part, math.inf, 1, keepdim=True, dtype=torch.float32)
            scales /= 2 ** (self._bits - 1) - 1
            rounded = (part / torch.where(scales == 0, 1.0, scales)).round_()
            self._integers[rows] = rounded if self._bits == 8 else _two_in_one(rounded.to(torch.int8))
            self._scales[rows] = scales
            first += len(part)

    def read(self, out: Tensor) -> None:
        """Read the values into a tensor, `[values]`."""
        whole, rest = self._split(out)
        integers = self._all_integers()
        torch.mul(integers[: len(whole)], self._scales[: len(whole)], out=whole)  # in one pass, whatever the dtype
        if len(rest):
            rest.copy_((integers[-1] * self._scales[-1])[: len(rest)])

    def add_to(self, sums: Tensor) -> None:
        """Add the values to sums in fp32, `[values]`."""
        whole, rest = self._split(sums)
        integers = self._all_integers()
        whole.addcmul_(integers[: len(whole)], self._scales[: len(whole)])
        if len(rest):
            rest += (integers[-1] * self._scales[-1])[: len(rest)]

    def _split(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """View whole blocks, `[blocks, BLOCK]`, and the rest."""
        whole = self._values // BLOCK * BLOCK
        return t[:whole].view(-1, BLOCK), t[whole:]

    def _all_integers(self) -> Tensor:
        """Return an integer for each value, `[blocks, BLOCK]`."""
        if self._bits == 8:
            return self._integers
        # An arithmetic shift extends the sign.
        return torch.stack([(self._integers << 4) >> 4, self._integers >> 4], -1).view(-1, BLOCK)


def value_blocks(t: Tensor) -> Iterator[Tensor]:
    """Yield whole blocks, and the rest of the values with zeros behind them, each `[blocks, BLOCK]`.

    Args:
        t: The values, `[values]`.
    """
    whole = len(t) // BLOCK * BLOCK
    if whole:
        yield t[:whole].view(-1, BLOCK)
    if whole < len(t):
        yield functional.pad(t[whole:], (0, whole + BLOCK - len(t)))[None]


def _two_in_one(integers: Tensor) -> Tensor:
    return (integers[:, ::2] & 15) | (integers[:, 1::2] << 4)


def _quantise(t: Tensor, bits: int) -> Tensor:
    """Return the bytes in which values are sent."""
    sent = t.new_empty(sent_bytes(len(t), bits), dtype=torch.uint8)
    Quantised(sent, len(t), bits).write(t)
    return sent


class _InCallersMemory:
    """Allocates what FSDP2 sends and receives as any other tensor."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantisedAllGather(_InCallersMemory):
    """An all-gather of weights with 8 bits, for `set_custom_all_gather`.

    Args:
        ranks: Number of ranks that hold the weights. What fewer of them gather is sent as it is.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather weights. The call is over, or ordered by the current stream, when it returns.

        Args:
            output_tensor: The weights of all ranks, one after the other.
            input_tensor: The weights of this rank.
            group: The ranks.
            async_op: Not used.
        """
        of_neighbours = group.size() < self._ranks
        if of_neighbours or group.size() == 1 or not input_tensor.is_floating_point():  # bytes of several dtypes
            _all_gather(output_tensor, input_tensor, group)
            return
        sent = _quantise(input_tensor, WEIGHT_BITS)
        received = sent.new_empty(group.size() * len(sent))
        _all_gather(received, sent, group)
        for weights, part in zip(output_tensor.chunk(group.size()), received.chunk(group.size()), strict=True):
            Quantised(part, len(weights), WEIGHT_BITS).read(weights)


class QuantisedReduceScatter(_InCallersMemory):
    """A reduce-scatter of gradients with 8 or 4 bits, whose sums are in fp32, for `set_custom_reduce_scatter`."""

    def __init__(self, bits: int) -> None:
        self._bits = bits

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Sum gradients over ranks. The call is over, or ordered by the current stream, when it returns.

        Args:
            output_tensor: The sums that belong to this rank.
            input_tensor: This rank's gradients for all ranks, one after the other.
            group: The ranks.
            op: Sum, which `set_force_sum_reduction_for_comms` asks for.
            async_op: Not used.

        Raises:
            ValueError: Another operation is asked for.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"gradients that are sent quantised are summed, not reduced by {op}")
        gradients = input_tensor.view(group.size(), -1)
        sent = torch.stack([_quantise(part, self._bits) for part in gradients])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        output_tensor.copy_(gradients[group.rank()])
        for rank, part in enumerate(received):
            if rank != group.rank():
                Quantised(part, len(output_tensor), self._bits).add_to(output_tensor)
