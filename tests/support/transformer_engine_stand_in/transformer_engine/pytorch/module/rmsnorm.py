"""The operation of the same name, as a module."""

from __future__ import annotations

from typing import Any

from transformer_engine.pytorch.ops.basic.rmsnorm import RMSNorm as _RMSNormOp


class RMSNorm(_RMSNormOp):
    """The operation, with the arguments of before."""

    def __init__(self, normalized_shape: int, eps: float = 1e-5, sequence_parallel: bool | None = None) -> None:
        self.sequence_parallel = sequence_parallel
        super().__init__(normalized_shape, eps=eps)

    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
