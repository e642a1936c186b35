"""Collectives whose names depend on the version of PyTorch."""

from __future__ import annotations

from typing import Any, Final

import torch.distributed as dist

# PyTorch 2.13 gives them new names and warns of the old ones.
all_gather_single: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
