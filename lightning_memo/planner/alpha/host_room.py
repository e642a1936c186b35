"""Whether what one fraction of the tokens swaps finds room on the host, on the disk, and in buffers on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts
from lightning_memo.artifacts.plan import StreamedBytes
from lightning_memo.planner.alpha.spilled_calls import calls_to_spill, disk_keeps_up


@dataclass(frozen=True, slots=True)
class Room:
    """What a plan takes, as functions of alpha.

    Attributes:
        costs: Of the layer calls, warm.
        budget: The limits.
        slot_bytes: Exact host bytes of one layer call for an alpha; not asked where slices swap for themselves.
        streamed_bytes: Exact bytes for an alpha, where they do; such slices do not go to the disk.
        slice_tokens: Most tokens that run through a layer at once; None: no limit.
    """

    costs: LayerCosts
    budget: Budget
    slot_bytes: Callable[[float], int]
    streamed_bytes: Callable[[float], StreamedBytes] | None
    slice_tokens: int | None = None

    @property
    def _calls(self) -> int:
        """Layer calls that leave the device whole."""
        return max(self.costs.calls - 2, 0)

    def host_bytes(self, alpha: float) -> int:
        """Bytes of all layer calls that are swapped."""
        if self.streamed_bytes is not None:
            return self.streamed_bytes(alpha).host
        return self._calls * self.slot_bytes(alpha) if self._calls else 0

    def spilled_calls(self, alpha: float) -> int | None:
        """The fewest layer calls that go to the disk; None: there is no room even so."""
        if self.streamed_bytes is not None:
            return 0 if self.host_bytes(alpha) <= self.budget.host_bytes else None
        return calls_to_spill(self._calls, self.slot_bytes(alpha), self.budget) if self._calls else 0

    def fits(self, alpha: float) -> bool:
        """Whether host and disk have room."""
        return self.spilled_calls(alpha) is not None

    def keeps_up(self, alpha: float) -> bool:
        """Whether no layer waits for the disk."""
        spilled = self.spilled_calls(alpha)
        return not spilled or disk_keeps_up(self.costs, self.slot_bytes(alpha), spilled, alpha)

    def device_bytes(self, alpha: float) -> int:
        """What `Plan.device_bytes` is going to be. It grows with alpha: buffers by more than there is to recompute."""
        if self.streamed_bytes is not None:
            sizes = self.streamed_bytes(alpha)
            buffers = 2 * sizes.slot + sizes.staging
        else:
            buffers = 2 * self.slot_bytes(alpha)
        return self.costs.fixed_device_bytes + self.costs.working_bytes_at(alpha, self.slice_tokens) + buffers

    def fits_device(self, alpha: float) -> bool:
        """Whether the device has room, too."""
        return self.device_bytes(alpha) <= self.budget.device_bytes
