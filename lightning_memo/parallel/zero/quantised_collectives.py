"""Weights and gradients of ZeRO that are sent as integers of 8 or 4 bits, in blocks with a scale each (ZeRO++).

Note: [Error of what is sent]
Let a be the largest magnitude in a block of 128 values. Each of them arrives within a / 254 with 8 bits, and within
a / 14 with 4 bits. All ranks compute with the same weights, those that have arrived. A gradient is the sum of this
rank's exact part and of the parts that have arrived, added in fp32: of W ranks, the error is at most that of W - 1
parts. A block with a NaN or an infinity arrives as values that are not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

BLOCK: Final = 128
_SCALE_BYTES: Final = 4
# Newer versions of PyTorch have another name for it, and warn of the old one.
_all_gather: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def send_quantised(unit: FSDPModule, gradient_bits: int) -> None:
    """Send the weights of an FSDP2 unit with 8 bits, and their gradients with 8 or 4 bits.

    Weights that have several dtypes are sent as they are.

    Args:
        unit: The unit.
        gradient_bits: Bits of each value of a gradient.
    """
    unit.set_custom_all_gather(QuantisedAllGather())
    unit.set_custom_reduce_scatter(QuantisedReduceScatter(gradient_bits))


def sent_bytes(values: int, bits: int) -> int:
    """Return the bytes in which some values are sent."""
    blocks = -(-values // BLOCK)
    return blocks * (BLOCK * bits // 8 + _SCALE_BYTES)


def quantise(t: Tensor, bits: int) -> Tensor:
    """Return values as bytes.

    Args:
        t: The values, `[values]`.
        bits: 8 or 4.

    Returns:
        Bytes, `[sent_bytes(values, bits)]`: the integers of all blocks, and then their scales in fp32.
    """
    padded = t.new_zeros(-(-len(t) // BLOCK) * BLOCK, dtype=torch.float32)
    padded[: len(t)] = t
    blocks = padded.view(-1, BLOCK)
    scales = blocks.abs().amax(-1) / (2 ** (bits - 1) - 1)
    blocks.div_(torch.where(scales == 0, 1.0, scales)[:, None]).round_()
    integers = blocks.nan_to_num_(0.0, 0.0, 0.0).to(torch.int8).view(torch.uint8)
    if bits == 4:
        integers = (integers[:, ::2] & 15) | (integers[:, 1::2] << 4)
    return torch.cat([integers.flatten(), scales.view(torch.uint8)])


def dequantise(sent: Tensor, values: int, bits: int) -> Tensor:
    """Return values in fp32, `[values]`, from the bytes of `quantise`.

    Args:
        sent: The bytes, `[sent_bytes(values, bits)]`.
        values: Number of values.
        bits: 8 or 4.
    """
    blocks = -(-values // BLOCK)
    integers, scales = sent.split([blocks * BLOCK * bits // 8, blocks * _SCALE_BYTES])
    integers = integers.view(torch.int8)
    if bits == 4:  # an arithmetic shift extends the sign
        integers = torch.stack([(integers << 4) >> 4, integers >> 4], -1)
    return (integers.view(blocks, BLOCK) * scales.view(torch.float32)[:, None]).flatten()[:values]


class _InCallersMemory:
    """Allocates what FSDP2 sends and receives as any other tensor."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class QuantisedAllGather(_InCallersMemory, AllGather):
    """An all-gather of weights with 8 bits."""

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
        if group.size() == 1 or not input_tensor.is_floating_point():  # bytes of several dtypes
            _all_gather(output_tensor, input_tensor, group)
            return
        sent = quantise(input_tensor, 8)
        received = sent.new_empty(group.size() * len(sent))
        _all_gather(received, sent, group)
        # Rank by rank, so that little is in fp32 at a time.
        for weights, part in zip(output_tensor.chunk(group.size()), received.chunk(group.size()), strict=True):
            weights.copy_(dequantise(part, len(weights), 8))


class QuantisedReduceScatter(_InCallersMemory, ReduceScatter):
    """A reduce-scatter of gradients with 8 or 4 bits, whose sums are in fp32."""

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
        sent = torch.stack([quantise(part, self._bits) for part in gradients])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        output_tensor.zero_()
        for rank, part in enumerate(received):
            exact = rank == group.rank()
            output_tensor += gradients[rank] if exact else dequantise(part, len(output_tensor), self._bits)
