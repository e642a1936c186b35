"""Random state of a device, captured and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RngState:
    """States of the CPU's generator and, on an accelerator, of the device's."""

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def capture(cls, device: torch.device, before: RngState | None = None) -> RngState:
        """The present states; the same object as `before` if nothing was drawn since."""
        accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        present = cls(device, torch.get_rng_state(), accelerator)
        return before if before is not None and present.same(before) else present

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, self.device)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Run with this state, then go back to the present one."""
        present = RngState.capture(self.device)
        self.restore()
        try:
            yield
        finally:
            present.restore()

    def same(self, other: RngState) -> bool:
        """Whether as much randomness was drawn up to both."""
        equal = torch.equal(self.cpu, other.cpu)
        if self.accelerator is not None and other.accelerator is not None:
            equal = equal and torch.equal(self.accelerator, other.accelerator)
        return equal
