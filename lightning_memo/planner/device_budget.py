"""How much device memory a plan may use."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from lightning_memo.artifacts.layer_costs import Budget, LayerCosts

# The rest of the free device memory is left to workspaces of kernels and to what the allocator rounds up and fragments.
_USABLE_SHARE: Final = 0.96
# Kept tensors fill the memory that is left then, while allocators fragment.
_USABLE_SHARE_FOR_KEPT: Final = 0.9


def usable_device_bytes(fixed_bytes: int, free_bytes: int) -> int:
    """Return the device bytes that a plan may use.

    Args:
        fixed_bytes: Bytes that every plan needs.
        free_bytes: Free bytes in addition to these.
    """
    return fixed_bytes + int(_USABLE_SHARE * free_bytes)


def with_spare_device(budget: Budget, costs: LayerCosts) -> Budget:
    """Reserve a part of the free device memory for fragmentation and workspaces, where tensors are kept.

    Args:
        budget: All free memory.
        costs: Costs whose fixed and working bytes every plan needs.
    """
    always = costs.fixed_device_bytes + costs.working_bytes(1.0)
    room = max(budget.device_bytes - always, 0)
    return replace(budget, device_bytes=budget.device_bytes - room + int(_USABLE_SHARE_FOR_KEPT * room))
