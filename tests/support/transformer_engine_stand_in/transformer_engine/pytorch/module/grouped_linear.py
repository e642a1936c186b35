"""A module that `MemoStrategy` does not support in FP8."""

from __future__ import annotations

from transformer_engine.pytorch.module.linear import Linear


class GroupedLinear(Linear):
    """Several linear modules, of which this one is the only one."""
