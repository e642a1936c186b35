"""The levels at which each model type is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TOKENS, SLICE_TOKENS = 48, 16


@dataclass(frozen=True)
class Level:
    """Settings of `MemoStrategy`.

    Attributes:
        settings: The settings.
        processes: Number of processes that train together.
        instead: Settings that the refusal of others advises, by a part of its message.
    """

    settings: Mapping[str, Any]
    processes: int = 1
    instead: tuple[str, Mapping[str, Any]] | None = None


_SLICED = {"alpha": 0.5, "slice_tokens": SLICE_TOKENS}
LEVELS = {
    "alpha 0": Level({"alpha": 0.0}),
    "alpha 1": Level({"alpha": 1.0}),
    "fractions": Level({"alpha": 0.5}),
    "slices": Level({**_SLICED, "stream_from_host": "hidden"}),
    "slice schedule": Level({**_SLICED, "stream_from_host": "model"}),
    "context": Level({"context_parallel_size": 2, "alpha": 0.0}, processes=2),
    "tensor": Level(
        {"tensor_parallel_size": 2, "alpha": 0.0},
        processes=2,
        instead=("sequence_parallel=False", {"tensor_parallel_size": 2, "alpha": 0.0, "sequence_parallel": False}),
    ),
}
