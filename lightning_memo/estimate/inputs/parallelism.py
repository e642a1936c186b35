"""Sizes of a parallelism, and what they do not divide."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from lightning_memo.artifacts.json_documents import check_range
from lightning_memo.shapes.model_shape import ModelShape

SEQUENCE: Final = "sequence"
BATCH: Final = "batch"
EXPERT_RANKS: Final = "data- and context-parallel processes"

Schedule = Literal["1f1b", "zero_bubble"]


_COUNTS = ("tp", "cp", "dp", "pp", "expert_parallel_size", "virtual_pipeline_size")


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
    """Sizes of tensor, context, data, pipeline and expert parallelism, and the ZeRO stage.

    Tensor parallelism divides heads and feed-forward, or the experts, and the tokens in between (sequence parallelism).
    Context parallelism divides the tokens. Expert parallelism divides the experts of each layer over data- and
    context-parallel ranks, which exchange tokens. ZeRO shards over data- and context-parallel ranks, and experts over
    those that have the same ones. Each stage of a pipeline has `virtual_pipeline_size` blocks of layers, and with
    `pipeline_schedule="zero_bubble"` computes gradients of weights later than those of hidden states.

    Raises:
        ValueError: A size is below 1, the stage is not from 0 to 3, or the schedule is unknown.
    """

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    zero_stage: int = 0
    expert_parallel_size: int = 1
    virtual_pipeline_size: int = 1
    pipeline_schedule: Schedule = "1f1b"

    def __post_init__(self) -> None:
        check_range(self, dict.fromkeys(_COUNTS, 1))
        if self.zero_stage > 3:
            raise ValueError(f"zero_stage={self.zero_stage} must be from 0 to 3")
        if self.pipeline_schedule not in get_args(Schedule):
            raise ValueError(f"pipeline_schedule={self.pipeline_schedule!r} must be 1f1b or zero_bubble")

    @property
    def weights_wait(self) -> bool:
        """Whether gradients of weights are computed later than those of hidden states."""
        return self.pipeline_schedule == "zero_bubble"

    @property
    def devices(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def obstacles(self, shape: ModelShape, seq_len: int, batch_size: int) -> tuple[Obstacle, ...]:
        """Return the properties of a model, its sequences and a batch that the sizes do not divide."""
        dense = [part.ffn for part in shape.runs if part.experts == 1]
        experts = [(self.tp * self.expert_parallel_size, "experts", n) for n in {shape.experts} - {1}]
        return tuple(
            Obstacle(size, of, count)
            for size, of, count in (
                (self.tp, "heads", shape.heads),
                (self.tp, "key and value heads", shape.kv_heads),
                *((self.tp, "width of the feed-forward", ffn) for ffn in dense[:1]),
                *experts,
                (self.expert_parallel_size, EXPERT_RANKS, self.dp * self.cp),
                (self.pp * self.virtual_pipeline_size, "layers", shape.layers),
                (self.cp * self.tp, SEQUENCE, seq_len),
                (self.dp, BATCH, batch_size),
            )
            if count % size
        )
