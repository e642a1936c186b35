"""Costs of the layers of a step, and the memory budget of a process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from lightning_memo.artifacts.json_documents import check_range, items

_RESIDENT_CALLS: Final = 2


def resident_calls(calls: int, in_flight: int | None) -> int:
    """Number of last layer calls whose activations never leave the device.

    Usually two: their backward comes first (MEMO, section 4.1). With several micro-batches in flight, the backward of
    another one comes between, and takes their rounding buffers.

    Args:
        calls: Number of layer calls that are alive at once.
        in_flight: Number of micro-batches that they belong to; None without a pipeline.
    """
    return min(_RESIDENT_CALLS, calls) if in_flight in (None, 1) else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """Bytes and seconds of the layers of one step. Tuples have one entry per layer call, in execution order.

    The byte fields are S_input, S_attn and S_others of MEMO, section 4.2, for all tokens of the batch.

    Raises:
        ValueError: The tuples differ in length or are empty, an entry is negative, or a bandwidth is not positive.
    """

    batch: int
    """Sequences of the batch."""

    tokens: int
    """Tokens of a sequence."""

    input_bytes: tuple[int, ...]
    """S_input: bytes of the layer's input."""

    attention_bytes: tuple[int, ...]
    """S_attn: bytes of the attention output and its log-sum-exp."""

    other_bytes: tuple[int, ...]
    """S_others: bytes of every other skeletal activation."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    """Seconds of the backward without recomputation."""

    recompute_seconds: tuple[float, ...]
    """Seconds to recompute all tokens, attention excluded."""

    outside_seconds: float
    """Seconds of the step outside the layers: embedding, head, loss, optimizer."""

    offload_bytes_per_second: float
    """Bandwidth from device to host, measured with both directions busy."""

    prefetch_bytes_per_second: float
    """Bandwidth from host to device, measured with both directions busy."""

    fixed_device_bytes: int
    """Device bytes that do not depend on the plan: parameters, gradients, optimizer state."""

    transient_device_bytes: int
    """Highest peak in forward, loss and optimizer above the fixed bytes and the skeletal activations."""

    backward_device_bytes: int = 0
    """Highest peak in a layer's backward above the fixed bytes, the skeletal and the recomputed activations."""

    spill_write_bytes_per_second: float = 0.0
    """Bandwidth from device to disk, measured with both directions busy; 0 if there is no disk."""

    spill_read_bytes_per_second: float = 0.0
    """Bandwidth from disk to device, measured with both directions busy."""

    swapped_other_bytes: tuple[int, ...] | None = None
    """S_others as it is swapped, compressed; None if it is swapped as it is."""

    compress_seconds: tuple[float, ...] | None = None
    """Seconds to compress S_others of all tokens in the forward; None if nothing is compressed."""

    restore_seconds: tuple[float, ...] | None = None
    """Seconds to restore S_others of all tokens in the backward; None if nothing is compressed."""

    in_flight: int | None = None
    """On a stage of a pipeline, number of micro-batches whose layer calls these are: forwards of later ones run before
    the backward of the first one. `outside_seconds` is 0 then. None without a pipeline."""

    def __post_init__(self) -> None:
        check_range(self, {"batch": 1, "tokens": 1, "in_flight": 1})
        lengths = {name: len(value) for name, value in items(self) if isinstance(value, tuple)}
        if len(set(lengths.values())) != 1 or not self.input_bytes:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"the numbers of layer calls must be equal and at least 1, but are: {listed}")
        for name in ("offload_bytes_per_second", "prefetch_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be greater than 0")

    @property
    def calls(self) -> int:
        """Number of layer calls in a step."""
        return len(self.input_bytes)

    @property
    def swapped_calls(self) -> int:
        """Number of layer calls whose activations leave the device."""
        return self.calls - resident_calls(self.calls, self.in_flight)

    @property
    def skeletal_bytes(self) -> int:
        """Device bytes of the activations that plain training keeps for the backward of all layers."""
        return sum(self.input_bytes) + sum(self.attention_bytes) + sum(self.other_bytes)

    def working_bytes(self, recomputed: float) -> int:
        """Highest peak of a step above the fixed bytes and the plan's buffers and kept activations.

        Args:
            recomputed: Fraction of the tokens whose activations a layer recomputes at once.
        """
        return self.working_bytes_with(math.ceil(recomputed * max(self.other_bytes)))

    def working_bytes_with(self, recomputed_bytes: int) -> int:
        """`working_bytes`, given the largest number of bytes that a layer recomputes at once."""
        return max(self.transient_device_bytes, self.backward_device_bytes + recomputed_bytes)

    def swapped_bytes(self, call: int, alpha: float) -> int:
        """Bytes that a layer call swaps: S_input + S_attn + alpha * S_others, rounded up; S_others compressed, if so.

        Args:
            call: Index of the layer call.
            alpha: Fraction of the tokens whose other skeletal activations are swapped.
        """
        return self.input_bytes[call] + self.attention_bytes[call] + math.ceil(alpha * self.moved_other_bytes[call])

    @property
    def moved_other_bytes(self) -> tuple[int, ...]:
        """S_others as it is swapped."""
        return self.other_bytes if self.swapped_other_bytes is None else self.swapped_other_bytes

    def forward_seconds_at(self, call: int, alpha: float) -> float:
        """Seconds of a forward that compresses what a fraction alpha of the tokens swaps, if that is compressed."""
        compress = 0.0 if self.compress_seconds is None else self.compress_seconds[call]
        return self.forward_seconds[call] + alpha * compress

    def backward_seconds_at(self, call: int, alpha: float) -> float:
        """Seconds of a backward that restores a fraction alpha of the tokens and recomputes the others."""
        return self.backward_seconds_of(call, alpha, 1.0 - alpha)

    def backward_seconds_of(self, call: int, restored: float, recomputed: float) -> float:
        """Seconds of a backward that restores a fraction of the tokens, and recomputes another one."""
        restore = 0.0 if self.restore_seconds is None else self.restore_seconds[call]
        return self.backward_seconds[call] + restored * restore + recomputed * self.recompute_seconds[call]


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """Memory that one process may use: all its device bytes, and host and disk bytes for swapped activations."""

    device_bytes: int
    host_bytes: int
    spill_bytes: int = 0

    def __post_init__(self) -> None:
        check_range(self, {})
