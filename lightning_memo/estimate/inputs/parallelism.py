"""Sizes of a parallelism, and what they do not divide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.shapes.model_shape import ModelShape

SEQUENCE: Final = "sequence"
BATCH: Final = "batch"


@dataclass(frozen=True, order=True, slots=True)
class Obstacle:
    """A size, and the property that it does not divide."""

    size: int
    of: str
    count: int

    def __str__(self) -> str:
        return f"{self.size} does not divide the {self.of}, {self.count}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """Sizes of tensor, context, data and pipeline parallelism, and the ZeRO stage.

    Tensor parallelism divides heads and feed-forward, and the tokens in between (sequence parallelism). Context
    parallelism divides the tokens. ZeRO shards over data- and context-parallel ranks.

    Raises:
        ValueError: A size is below 1, or the stage is not from 0 to 3.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    zero_stage: int = 0

    def __post_init__(self) -> None:
        check_range(self, dict.fromkeys(("tp", "cp", "dp", "pp"), 1))
        if self.zero_stage > 3:
            raise ValueError(f"zero_stage={self.zero_stage} must be from 0 to 3")

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def obstacles(self, shape: ModelShape, seq_len: int, batch_size: int) -> tuple[Obstacle, ...]:
        """Return the properties of a model, its sequences and a batch that the sizes do not divide."""
        return tuple(
            Obstacle(size, of, count)
            for size, of, count in (
                (self.tp, "heads", shape.heads),
                (self.tp, "key and value heads", shape.kv_heads),
                (self.tp, "width of the feed-forward", shape.ffn),
                (self.pp, "layers", shape.layers),
                (self.cp * self.tp, SEQUENCE, seq_len),
                (self.dp, BATCH, batch_size),
            )
            if count % size
        )
