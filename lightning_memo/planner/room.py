"""Where what leaves the device by one fraction of the tokens finds room: on the host, or on the disk too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_memo.costs import Budget, LayerCosts
from lightning_memo.plan import StreamedBytes
from lightning_memo.planner.spill import calls_to_spill, disk_keeps_up


@dataclass(frozen=True, slots=True)
class Room:
    """What is off the device, as functions of alpha.

    Attributes:
        costs: Of the layer calls, warm.
        budget: The limits.
        slot_bytes: Exact host bytes of one layer call for an alpha; not asked where slices swap for themselves.
        streamed_bytes: Exact bytes for an alpha, where they do; such slices do not go to the disk.
    """

    costs: LayerCosts
    budget: Budget
    slot_bytes: Callable[[float], int]
    streamed_bytes: Callable[[float], StreamedBytes] | None

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
