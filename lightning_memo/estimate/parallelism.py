"""How the work is divided over devices."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memo.documents import check_range
from lightning_memo.estimate.shape import ModelShape


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

    def why_not(self, shape: ModelShape, seq_len: int, batch_size: int) -> str:
        """Why a model, sequences and a batch can't be divided so; empty if they can."""
        for size, of, count in (
            (self.tp, "the heads", shape.heads),
            (self.tp, "the key and value heads", shape.kv_heads),
            (self.tp, "the width of the feed-forward", shape.ffn),
            (self.pp, "the layers", shape.layers),
            (self.cp * self.tp, "the sequence", seq_len),
            (self.dp, "the batch", batch_size),
        ):
            if count % size:
                return f"{size} does not divide {of}, {count}"
        return ""
