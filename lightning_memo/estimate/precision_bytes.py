"""Sizes of weights, gradients and activations by precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Precision = Literal["bf16-true", "bf16-mixed", "32-true"]

BF16: Final = 2
FP32: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementBytes:
    """Bytes per element of the model state and of activations."""

    weight: int
    gradient: int
    optimizer: int
    """Optimizer state per weight: two moments, and an fp32 weight if the model's weights are not in fp32."""

    product: int
    """Inputs, outputs and weights of matrix products."""

    stream: int
    """Hidden states of the residual stream, and norms."""

    reduced: int
    """Gradients in communication between devices."""

    whole_copies: bool
    """Whether FSDP2 shards the state from ZeRO 1 on and holds full copies of weights in addition to the shards."""

    @property
    def copies_weights(self) -> bool:
        """Whether each product casts a copy of its weight to the type of the computation."""
        return self.weight != self.product

    @property
    def rate(self) -> float:
        """Speed of products relative to the bf16 peak. Products in fp32 may use TF32 and run at half of it."""
        return 2 / self.product


def bytes_of(precision: Precision, devices: int) -> ElementBytes:
    """Return the sizes of training with this package and AdamW.

    Args:
        precision: Precision of Lightning. On one device, bf16-mixed is autocast and hidden states stay in fp32. On
            several devices, FSDP2 casts weights and inputs.
        devices: Number of devices.
    """
    if precision == "bf16-mixed":
        stream = FP32 if devices == 1 else BF16
        size, product = FP32, BF16
    else:
        size = product = stream = BF16 if precision == "bf16-true" else FP32
    return ElementBytes(
        weight=size,
        gradient=size,
        optimizer=2 * size,
        product=product,
        stream=stream,
        reduced=FP32,
        whole_copies=devices > 1,
    )
