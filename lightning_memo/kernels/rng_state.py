"""The states of random number generators, which can be captured and replayed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RngState:
    """States of the CPU's random number generator and, on a GPU, of the device's.

    Attributes:
        device: The device.
        cpu: State of the CPU's generator.
        accelerator: State of the device's generator; `None` on a CPU.
    """

    device: torch.device
    cpu: Tensor
    accelerator: Tensor | None

    @classmethod
    def capture(cls, device: torch.device, before: RngState | None = None) -> RngState:
        """Return the current states, or `before` itself if no random number was drawn since then."""
        accelerator = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        present = cls(device, torch.get_rng_state(), accelerator)
        return before if before is not None and present.same(before) else present

    def restore(self) -> None:
        """Make these states the current ones."""
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.cuda.set_rng_state(self.accelerator, self.device)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Use these states inside this context, and restore the current ones afterwards."""
        present = RngState.capture(self.device)
        self.restore()
        try:
            yield
        finally:
            present.restore()

    def check_repeated(self, drawer: str) -> None:
        """Check that these are the current states: numbers were drawn again, and these followed the first draws.

        Args:
            drawer: What drew them, for the message.

        Raises:
            RuntimeError: Other numbers were drawn.
        """
        if not RngState.capture(self.device).same(self):
            raise RuntimeError(
                f"{drawer} drew other random numbers in the backward than in the forward: another thread of this "
                "process draws from PyTorch's generator as well, of which there is one for all threads: give that "
                "thread a torch.Generator of its own, or run it in another process"
            )

    def branch(self) -> None:
        """Make states the current ones that these decide alone, and that give other numbers than these."""
        self.restore()
        torch.manual_seed(int(torch.randint(2**63 - 1, (), device="cpu")))

    def same(self, other: RngState) -> bool:
        """Return whether both states are equal."""
        equal = torch.equal(self.cpu, other.cpu)
        if self.accelerator is not None and other.accelerator is not None:
            equal = equal and torch.equal(self.accelerator, other.accelerator)
        return equal
