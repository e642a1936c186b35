"""Time that slices wait for copies, where each slice of a layer swaps by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lightning_memo.artifacts.layer_costs import LayerCosts
from lightning_memo.artifacts.swap_plan import Schedule, StreamedBytes

_BUFFERS: Final = 2  # rounding buffers: one slice is computed while another one is copied
_LAYERS: Final = 3  # the last of so many equal layers waits as all later ones do


@dataclass(frozen=True, slots=True)
class _SliceWork:
    forward_seconds: float
    backward_seconds: float
    offload_seconds: float
    prefetch_seconds: float


def layer_seconds(costs: LayerCosts, call: int, sizes: StreamedBytes, schedule: Schedule) -> tuple[float, float]:
    """Seconds of the forward and of the backward of a layer call, waits for copies included.

    Slices use two rounding buffers in turn. In the forward, a slice waits until the buffer of the one before the last
    is on the host; in the backward, until its own bytes have returned to a buffer that a later slice has left. Keys and
    values of earlier slices have buffers of their own, and waits for them are part of the measured times.

    Args:
        costs: Seconds, bytes and bandwidths of the layer calls.
        call: Index of the layer call.
        sizes: Memory of the plan.
        schedule: With "slice", the slices before and after one are those of other layers, of the same tokens.
    """
    work = list(_slice_work(costs, call, sizes))
    groups = [[part] for part in work] if schedule == "slice" else [work]
    forward = sum(_seconds([(part.forward_seconds, part.offload_seconds) for part in group], True) for group in groups)
    back = [[(part.backward_seconds, part.prefetch_seconds) for part in reversed(group)] for group in groups]
    return forward, sum(_seconds(group, False) for group in back)


def _slice_work(costs: LayerCosts, call: int, sizes: StreamedBytes) -> Iterator[_SliceWork]:
    forward, recompute = costs.forward_seconds[call], costs.recompute_seconds[call]
    compress = costs.forward_seconds_at(call, 1.0) - forward
    restore = costs.backward_seconds_at(call, 1.0) - costs.backward_seconds[call]
    attention = max(1.0 - recompute / forward, 0.0) if forward else 0.0  # share of a layer's time
    tokens, start = sum(part.tokens for part in sizes.slices), 0
    for part in sizes.slices:
        local, stop = part.tokens / tokens, start + part.tokens
        seen = (stop**2 - start**2) / tokens**2  # share of the pairs under a causal mask
        share = (1.0 - attention) * local + attention * seen
        yield _SliceWork(
            forward_seconds=share * forward + (local * compress if part.swapped else 0.0),
            backward_seconds=share * costs.backward_seconds[call] + local * (restore if part.swapped else recompute),
            offload_seconds=part.slot / costs.offload_bytes_per_second,
            prefetch_seconds=part.slot / costs.prefetch_bytes_per_second,
        )
        start = stop


def _seconds(slices: Sequence[tuple[float, float]], writes: bool) -> float:
    """Seconds of a layer, given those of the computation and of the copy of each slice.

    Args:
        slices: Seconds in the order in which the slices run.
        writes: Whether a slice is copied after its computation, rather than before.
    """
    free, copied, now, began = [0.0] * _BUFFERS, 0.0, 0.0, 0.0  # times at which something is over
    for layer in range(_LAYERS):
        began = now
        for n, (seconds, copy) in enumerate(slices, layer * len(slices)):
            buffer = n % _BUFFERS
            if writes:
                now = max(now, free[buffer]) + seconds
                copied = free[buffer] = max(copied, now) + copy
            else:
                copied = max(copied, free[buffer]) + copy
                now = free[buffer] = max(now, copied) + seconds
    return now - began
