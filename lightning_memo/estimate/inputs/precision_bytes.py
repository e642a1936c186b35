"""How many bytes numbers take: by Lightning's precision here, by their own ways in the papers' programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Precision = Literal["bf16-true", "bf16-mixed", "32-true"]

_BF16: Final = 2
_FP32: Final = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ElementBytes:
    """Bytes of each weight as it is kept, and of each element that is computed with."""

    weight: int
    gradient: int
    optimizer: int
    """Of each weight: two moments, and fp32 weights where those that are computed with are not."""

    product: int
    """Of what matrix products read and give, weights included."""

    stream: int
    """Of the hidden states that layers add to, and of norms."""

    reduced: int
    """Of a gradient on its way between devices."""

    whole_copies: bool
    """Whether FSDP2 shards state from ZeRO 1 on, and holds whole copies of what products read beside the shards."""

    @property
    def copies_weights(self) -> bool:
        """Whether each product copies its weight to the type it computes in."""
        return self.weight != self.product

    @property
    def rate(self) -> float:
        """Share of the peak in bf16 at which products run: those of fp32 at half of it, where they may use TF32."""
        return 2 / self.product


def program_bytes(gradient: int = 2) -> ElementBytes:
    """Of programs that compute in bf16 and keep fp32 weights and moments for the optimizer (ZeRO, section 3).

    Args:
        gradient: Megatron-LM's are in fp32.
    """
    return ElementBytes(
        weight=2, gradient=gradient, optimizer=12, product=2, stream=2, reduced=gradient, whole_copies=False
    )


def bytes_of(precision: Precision, devices: int) -> ElementBytes:
    """Of training by this project, with AdamW.

    Args:
        precision: Lightning's. bf16-mixed is autocast on one device, where hidden states stay in fp32; FSDP2 casts
            weights and inputs on several.
        devices: that share the work.
    """
    if precision == "bf16-mixed":
        stream = _FP32 if devices == 1 else _BF16
        size, product = _FP32, _BF16
    else:
        size = product = stream = _BF16 if precision == "bf16-true" else _FP32
    return ElementBytes(
        weight=size,
        gradient=size,
        optimizer=2 * size,
        product=product,
        stream=stream,
        reduced=_FP32,
        whole_copies=devices > 1,
    )
