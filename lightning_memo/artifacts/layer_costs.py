"""What the layers of a step cost, and what there is to spend. Pure: imports neither torch nor Lightning."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_memo.artifacts.json_documents import check_range, items


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCosts:
    """What the layers of one step cost: tuples have one entry per layer call, in the order of execution.

    The byte fields are the S_input, S_attn and S_others of MEMO, section 4.2, for all tokens of the batch.

    Raises:
        ValueError: tuples of different lengths, no layer call, a negative entry, or a bandwidth that is not positive.
    """

    batch: int
    tokens: int
    input_bytes: tuple[int, ...]
    """S_input: the layer's input."""

    attention_bytes: tuple[int, ...]
    """S_attn: the attention output and its log-sum-exp."""

    other_bytes: tuple[int, ...]
    """S_others: every other skeletal activation."""

    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    """Backward without recomputation."""

    recompute_seconds: tuple[float, ...]
    """Recomputing all tokens, attention excluded."""

    outside_seconds: float
    """The step outside the layers: embedding, head, loss, optimizer."""

    offload_bytes_per_second: float
    """Device to host, measured with both directions busy."""

    prefetch_bytes_per_second: float
    """Host to device, measured with both directions busy."""

    fixed_device_bytes: int
    """On the device whatever the plan: parameters, gradients, optimizer state."""

    transient_device_bytes: int
    """Highest peak above fixed bytes and skeletal activations in the forward, the loss and the optimizer."""

    backward_device_bytes: int = 0
    """Highest peak in a layer's backward, above the same and above what the layer recomputed."""

    spill_write_bytes_per_second: float = 0.0
    """Device to disk, measured with both directions busy; 0: there is no disk."""

    spill_read_bytes_per_second: float = 0.0
    """Disk to device, measured with both directions busy."""

    def __post_init__(self) -> None:
        check_range(self, {"batch": 1, "tokens": 1})
        lengths = {name: len(value) for name, value in items(self) if isinstance(value, tuple)}
        if len(set(lengths.values())) != 1 or not self.input_bytes:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ValueError(f"layer calls must be at least 1 and agree in number, but there are: {listed}")
        for name in ("offload_bytes_per_second", "prefetch_bytes_per_second"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r} must be more than 0")

    @property
    def calls(self) -> int:
        """Number of layer calls in a step."""
        return len(self.input_bytes)

    @property
    def skeletal_bytes(self) -> int:
        """Bytes that plain training keeps on the device for the backward of all layers."""
        return sum(self.input_bytes) + sum(self.attention_bytes) + sum(self.other_bytes)

    def working_bytes(self, recomputed: float) -> int:
        """Highest peak of a step above fixed bytes and what a plan keeps or buffers.

        Args:
            recomputed: fraction of the tokens whose activations a layer recomputes at once.
        """
        largest = max(self.other_bytes)
        return max(self.transient_device_bytes, self.backward_device_bytes + math.ceil(recomputed * largest))

    def working_bytes_at(self, alpha: float, slice_tokens: int | None) -> int:
        """`working_bytes` where `alpha` is the fraction of the tokens that is swapped.

        Args:
            alpha: see there.
            slice_tokens: most tokens that run through a layer at once; None: no limit.
        """
        return self.working_bytes(min((slice_tokens or self.tokens) / self.tokens, 1.0 - alpha))

    def swapped_bytes(self, call: int, alpha: float) -> int:
        """Bytes that a layer call swaps: S_input + S_attn + alpha * S_others, rounded up.

        Args:
            call: index of the layer call.
            alpha: fraction of the tokens whose other skeletal activations are swapped.
        """
        return self.input_bytes[call] + self.attention_bytes[call] + math.ceil(alpha * self.other_bytes[call])


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """What one process may use: all its device bytes, and host and disk bytes for swapped activations."""

    device_bytes: int
    host_bytes: int
    spill_bytes: int = 0

    def __post_init__(self) -> None:
        check_range(self, {})
