"""How the work is divided over devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.shapes.model_shape import ModelShape

SEQUENCE: Final = "sequence"
BATCH: Final = "batch"


@dataclass(frozen=True, order=True, slots=True)
class Obstacle:
    """A size, and what it does not divide."""

    size: int
    of: str
    count: int

    def __str__(self) -> str:
        return f"{self.size} does not divide the {self.of}, {self.count}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """Sizes of tensor, context, data and pipeline parallelism, and the stage of ZeRO.

    Tensor parallelism divides heads, feed-forward and (as sequence parallelism) what lies between them; context
    parallelism the tokens. ZeRO shards over data and context ranks.

    Raises:
        ValueError: a size below 1, or a stage outside 0 to 3.
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
        """What of a model, sequences and a batch can't be divided so; none if all can."""
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
