"""Divisions of the work among processes."""

from __future__ import annotations

from typing import Any

BOUND = 1e-5

# Name: processes, and settings of the strategy.
CONFIGURATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_parallel_size": 2, "sequence_parallel": False}),
    "tp2+sp": (2, {"tensor_parallel_size": 2}),
    "cp2 ring": (2, {"context_parallel_size": 2}),
    "cp2 ulysses": (2, {"context_parallel_size": 2, "ulysses_size": 2}),
    "cp3 ring": (3, {"context_parallel_size": 3}),
    "cp4 ring": (4, {"context_parallel_size": 4}),
    "cp4 ulysses": (4, {"context_parallel_size": 4, "ulysses_size": 4}),
    "cp4 ulysses2 x ring2": (4, {"context_parallel_size": 4, "ulysses_size": 2}),
    "one process zero0": (1, {"zero_stage": 0}),
    "one process zero3 offload": (1, {"zero_stage": 3, "offload_state": True}),
    "dp2 zero0": (2, {"zero_stage": 0}),
    "dp2 zero1": (2, {"zero_stage": 1}),
    "dp2 zero2": (2, {"zero_stage": 2}),
    "dp2 zero3": (2, {"zero_stage": 3}),
    "dp2 x cp2": (4, {"context_parallel_size": 2}),
    "dp2 x cp2 zero3 ulysses": (4, {"context_parallel_size": 2, "zero_stage": 3, "ulysses_size": 2}),
    "cp2 x tp2+sp": (4, {"context_parallel_size": 2, "tensor_parallel_size": 2}),
    "cp2 x tp2": (4, {"context_parallel_size": 2, "tensor_parallel_size": 2, "sequence_parallel": False}),
    "dp2 x tp2+sp zero3": (4, {"tensor_parallel_size": 2, "zero_stage": 3}),
    "dp2 zero3 offload": (2, {"zero_stage": 3, "offload_state": True}),
}
