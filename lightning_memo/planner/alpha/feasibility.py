"""Whether a plan with a given alpha fits the host, the disk and the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.swap_plan import StreamedBytes, is_swapped
from lightning_memo.planner.alpha.disk_tier import calls_to_spill, disk_keeps_up


@dataclass(frozen=True, slots=True)
class Feasibility:
    """Memory that a plan needs as a function of alpha, compared with a budget.

    Attributes:
        costs: Costs of the layer calls, without the outliers of a first step.
        budget: Limits of device, host and disk.
        slot_bytes: Returns the exact host bytes of one layer call for an alpha; not called with `streamed_bytes`.
        streamed_bytes: Returns the exact bytes for an alpha where each slice swaps into a slot of its own, which never
            goes to the disk; None if whole layer calls swap.
        slice_tokens: Maximum number of tokens that run through a layer at once; None for no limit.
        whole_layers: Whether fractions are those of the layer calls, of which `slot_bytes` knows the bytes of swapped
            (1.0) and recomputed (0.0) ones.
    """

    costs: LayerCosts
    budget: Budget
    slot_bytes: Callable[[float], int]
    streamed_bytes: Callable[[float], StreamedBytes] | None
    slice_tokens: int | None = None
    whole_layers: bool = False

    @property
    def _calls(self) -> int:
        """Number of layer calls whose activations leave the device (MEMO, section 4.2)."""
        return self.costs.swapped_calls

    def host_bytes(self, alpha: float) -> int:
        """Bytes of all swapped activations."""
        if self.streamed_bytes is not None:
            return self.streamed_bytes(alpha).host
        if not self._calls:
            return 0
        if self.mixed(alpha):
            swapped = sum(is_swapped(call, alpha, self.costs.calls) for call in range(self._calls))
            return swapped * self.slot_bytes(1.0) + (self._calls - swapped) * self.slot_bytes(0.0)
        return self._calls * self.slot_bytes(alpha)

    def mixed(self, alpha: float) -> bool:
        """Whether some layer calls are swapped as a whole, and the others recomputed."""
        return self.whole_layers and 0.0 < alpha < 1.0

    def spilled_calls(self, alpha: float) -> int | None:
        """Smallest number of layer calls that have to go to the disk; None if host and disk cannot hold them all."""
        if self.streamed_bytes is not None or self.mixed(alpha):
            return 0 if self.host_bytes(alpha) <= self.budget.host_bytes else None
        return calls_to_spill(self._calls, self.slot_bytes(alpha), self.budget) if self._calls else 0

    def fits(self, alpha: float) -> bool:
        """Whether host and disk can hold the swapped activations."""
        return self.spilled_calls(alpha) is not None

    def keeps_up(self, alpha: float) -> bool:
        """Whether no layer waits for the disk."""
        spilled = self.spilled_calls(alpha)
        return not spilled or disk_keeps_up(self.costs, self.slot_bytes(alpha), spilled, alpha)

    def device_bytes(self, alpha: float) -> int:
        """`Plan.device_bytes` of the plan.

        Grows with alpha, because buffers grow by more than recomputation shrinks, unless activations are compressed.
        """
        if self.streamed_bytes is not None:
            sizes = self.streamed_bytes(alpha)
            buffers = 2 * sizes.slot + sizes.staging
        else:
            buffers = 2 * self.largest_slot_bytes(alpha)
        least_alpha = 0.0 if self.mixed(alpha) else alpha
        return self.costs.fixed_device_bytes + self.costs.working_bytes_at(least_alpha, self.slice_tokens) + buffers

    def largest_slot_bytes(self, alpha: float) -> int:
        """Host bytes of the layer call that swaps most."""
        return self.slot_bytes(1.0 if self.mixed(alpha) else alpha)

    def fits_device(self, alpha: float) -> bool:
        """Whether the device budget holds the plan."""
        return self.device_bytes(alpha) <= self.budget.device_bytes
