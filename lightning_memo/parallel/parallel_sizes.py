"""Sizes of the kinds of parallelism and checks of their combinations, and bytes that ZeRO sends. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from lightning_memo.config import MemoConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """Sizes of the kinds of parallelism.

    Attributes:
        data: Data-parallel size: number of groups of ranks with different batches.
        context: Context-parallel size: number of ranks that divide the tokens of a sequence.
        tensor: Tensor-parallel size: number of ranks that divide the weights of a layer.
        shards: Number of ranks that divide the tokens between the blocks of a layer: `tensor` with sequence
            parallelism, otherwise 1.
        pipeline: Pipeline-parallel size: number of stages, each with some of the layers.
        blocks: Number of blocks of layers of each stage.
        expert: Expert-parallel size: number of `data` x `context` ranks that divide the experts of a layer.
    """

    data: int = 1
    context: int = 1
    tensor: int = 1
    shards: int = 1
    expert: int = 1
    pipeline: int = 1
    blocks: int = 1

    @property
    def processes(self) -> int:
        return self.pipeline * self.stage_processes

    @property
    def stage_processes(self) -> int:
        """Number of ranks of a pipeline stage; all of them without a pipeline."""
        return self.data * self.context * self.tensor

    @property
    def replicas(self) -> int:
        """Number of ranks with the same weights and different tokens, over which ZeRO shards."""
        return self.data * self.context

    @property
    def shares_experts(self) -> bool:
        """Whether ranks with different batches share experts, and send each other tokens."""
        return self.expert > self.context

    def describe(self, zero_stage: int, zero_communication: str = "none", zero_shard_size: int | None = None) -> str:
        """Returns a short label, like "dp2-cp2-tp1-zero3"."""
        sequence = "sp" if self.shards > 1 else ""
        expert = f"-ep{self.expert}" if self.expert > 1 else ""
        blocks = f"x{self.blocks}" if self.blocks > 1 else ""
        stages = f"pp{self.pipeline}{blocks}-" if self.pipeline > 1 else ""
        near = f"-shard{zero_shard_size}" if zero_shard_size is not None else ""
        sent = f"-{zero_communication}" if zero_communication != "none" else ""
        return f"{stages}dp{self.data}-cp{self.context}-tp{self.tensor}{sequence}{expert}-zero{zero_stage}{near}{sent}"


def resolve_sizes(config: MemoConfig, processes: int) -> ParallelSizes:
    """Returns the parallel sizes for a number of processes.

    Args:
        config: The user's settings.
        processes: Number of processes in the run.

    Raises:
        ValueError: The product of the sizes is not the number of processes, or the expert-parallel size does not fit.
    """
    context, tensor, pipeline = config.context_parallel_size, config.tensor_parallel_size, config.pipeline_parallel_size
    others = context * tensor * pipeline
    if processes % others:
        sizes = {"context": context, "tensor": tensor, "pipeline": pipeline}
        named = [f"{name}_parallel_size={size}" for name, size in sizes.items() if size > 1]
        product, lower = (f" = {others}", "one") if len(named) > 1 else ("", "it")
        raise ValueError(
            f"{' x '.join(named)}{product} does not divide the {processes} processes: start a multiple of {others} "
            f"(torchrun, or devices x num_nodes of Lightning's Trainer), or lower {lower}"
        )
    data = processes // others
    _check_expert_size(config.expert_parallel_size, data, context)
    if config.zero_shard_size is not None and (data * context) % config.zero_shard_size:
        raise ValueError(
            f"zero_shard_size={config.zero_shard_size} does not divide the {data * context} processes with the same "
            f"weights: give a divisor of {data * context}"
        )
    return ParallelSizes(
        data=data,
        context=context,
        tensor=tensor,
        shards=tensor if config.sequence_parallel else 1,
        expert=config.expert_parallel_size,
        pipeline=pipeline,
        blocks=config.virtual_pipeline_size,
    )


def _check_expert_size(expert: int, data: int, context: int) -> None:
    if (data * context) % expert or (context % expert and expert % context):
        fitting = (n for n in range(1, data * context + 1) if (data * context) % n == 0)
        allowed = ", ".join(str(n) for n in fitting if context % n == 0 or n % context == 0)
        raise ValueError(
            f"expert_parallel_size={expert} does not fit {data * context} processes with context_parallel_size="
            f"{context}: it has to divide their number, and either it or the context-parallel size has to divide the "
            f"other one; it can be {allowed}"
        )


def ulysses_size(config: MemoConfig, heads: int, kv_heads: int) -> int:
    """Returns the number of ranks in each all-to-all group of Ulysses attention. The groups form rings.

    Args:
        config: The user's settings.
        heads: Number of query heads on one rank, after tensor parallelism.
        kv_heads: Number of key-value heads on one rank, after tensor parallelism.

    Raises:
        ValueError: The size does not divide the number of query heads.
    """
    context = config.context_parallel_size
    if config.ulysses_size == "auto":
        return choose_ulysses(context, heads, kv_heads)
    wanted = int(config.ulysses_size)
    if heads % wanted:
        fitting = ", ".join(str(n) for n in range(1, context + 1) if context % n == 0 and heads % n == 0)
        raise ValueError(
            f"Ulysses attention cannot divide {heads} heads over {wanted} processes: set "
            f"ulysses_size to one of {fitting} (1 is ring attention)"
        )
    return wanted


def choose_ulysses(context_size: int, heads: int, kv_heads: int) -> int:
    """Returns the size of the all-to-all groups when context parallelism combines Ulysses and ring attention.

    The result is the largest divisor of `context_size` that divides both the query heads and the key-value heads. If
    only 1 divides both, it is the largest divisor that divides the query heads, and key and value heads are sent to
    more than one rank.

    Args:
        context_size: Context-parallel size.
        heads: Number of query heads on one rank.
        kv_heads: Number of key-value heads on one rank.
    """
    divisors = [n for n in range(1, context_size + 1) if context_size % n == 0 and heads % n == 0]
    even = max(n for n in divisors if kv_heads % n == 0)
    return even if even > 1 else max(divisors)


BLOCK: Final = 128
"""Number of values that are sent with one scale."""

SCALE_BYTES: Final = 4

WEIGHT_BITS: Final = 8

GRADIENT_BITS: Final = {"int8": 8, "int4": 4}
"""Bits of a gradient by `zero_communication`."""


def sent_bytes(values: int, bits: int) -> int:
    """Return the bytes in which some values of `bits` bits each are sent: in blocks, of which the last is filled up."""
    return -(-values // BLOCK) * (BLOCK * bits // 8 + SCALE_BYTES)
