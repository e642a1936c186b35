"""The largest fraction of the tokens that overlap and host memory allow to swap (MEMO, section 4.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.utils.units import format_bytes

Binding = Literal["overlap", "host", "compression", "all tokens swapped"]

TOLERANCE: Final = 1e-6
"""Share by which a copy may take longer than its forward: measured times are far less exact."""

_MORE_HOST_MEMORY: Final = "raise host_memory or shorten the sequence"
_MORE_DISK: Final = "raise host_memory or spill_memory, or shorten the sequence"


class HostMemoryError(ValueError):
    """The host cannot hold the activations that have to be swapped."""

    def __init__(self, alpha: float, needed_bytes: int, budget: Budget, remedy: str = "") -> None:
        disk = f", plus {format_bytes(budget.spill_bytes)} of disk" if budget.spill_bytes else ""
        super().__init__(
            f"alpha={alpha:g} swaps {format_bytes(needed_bytes)} ({needed_bytes} bytes) to the host, but the budget is "
            f"{format_bytes(budget.host_bytes)} ({budget.host_bytes} bytes) of host memory{disk}: "
            + (remedy or (_MORE_DISK if disk else _MORE_HOST_MEMORY))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AlphaSolution:
    """The largest fraction of the tokens that can be swapped, and the constraint that limits it."""

    alpha: float
    binding: Binding
    hidden: bool
    """Whether every layer's copy fits under its forward; False only at alpha 0."""


def solve_alpha(costs: LayerCosts, budget: Budget) -> AlphaSolution:
    """Maximize alpha in [0, 1] under the overlap and host memory constraints of MEMO, section 4.2.

    For each swapped layer, `(S_input + S_attn + alpha * S_others) / B <= T_layer`; over all swapped layers,
    `sum(S_input + S_attn + alpha * S_others) <= M_host`. The last layer calls, usually two, never leave the device, so
    neither constraint includes them. B is the smaller of the two bandwidths, T_layer the forward time. With alpha as
    the only variable, the linear program's optimum is the smallest of the constraints' upper bounds. If activations are
    swapped compressed, S_others is their compressed size, T_layer grows with alpha by the time to compress them, and
    alpha is 0 where recomputation takes less time than to compress and restore them.

    Args:
        costs: Bytes and seconds of each layer call.
        budget: M_host is the sum of its host bytes and its disk bytes.

    Raises:
        HostMemoryError: The budget cannot hold the layer inputs and attention outputs (alpha = 0).
    """
    swapped = range(costs.swapped_calls)
    least_bytes = sum(costs.swapped_bytes(call, 0.0) for call in swapped)
    room_bytes = budget.host_bytes + budget.spill_bytes
    if least_bytes > room_bytes:
        raise HostMemoryError(0.0, least_bytes, budget)
    bandwidth = min(costs.offload_bytes_per_second, costs.prefetch_bytes_per_second)
    spare_bytes = [costs.forward_seconds[call] * bandwidth - costs.swapped_bytes(call, 0.0) for call in swapped]
    if any(spare < 0 for spare in spare_bytes):
        return AlphaSolution(alpha=0.0, binding="overlap", hidden=False)
    if compression_outlasts_recomputation(costs):
        return AlphaSolution(alpha=0.0, binding="compression", hidden=True)
    # The forward that compresses more lasts longer, too.
    longer_seconds = [costs.forward_seconds_at(call, 1.0) - costs.forward_seconds[call] for call in swapped]
    exposed_bytes = [
        max(costs.moved_other_bytes[call] - seconds * bandwidth, 0.0)
        for call, seconds in zip(swapped, longer_seconds, strict=True)
    ]
    overlap = min(map(_upper_bound, spare_bytes, exposed_bytes), default=math.inf)
    host = _upper_bound(room_bytes - least_bytes, sum(costs.moved_other_bytes[call] for call in swapped))
    alpha = min(overlap, host)
    if alpha >= 1.0 - TOLERANCE:
        return AlphaSolution(alpha=1.0, binding="all tokens swapped", hidden=True)
    return AlphaSolution(alpha=alpha, binding="host" if host < overlap else "overlap", hidden=True)


def compression_outlasts_recomputation(costs: LayerCosts) -> bool:
    """Return whether to compress and restore activations takes longer than to recompute them."""
    if costs.compress_seconds is None or costs.restore_seconds is None:
        return False
    return sum(costs.compress_seconds) + sum(costs.restore_seconds) > sum(costs.recompute_seconds)


def _upper_bound(room_bytes: float, other_bytes: float) -> float:
    """Largest alpha with `alpha * other_bytes <= room_bytes`."""
    return room_bytes / other_bytes if other_bytes else math.inf
