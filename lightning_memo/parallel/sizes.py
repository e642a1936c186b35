"""How many processes share what: sizes, and whether they go together. Pure: imports neither torch nor Lightning."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_memo.config import MemoConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """Sizes of the three kinds of parallelism.

    Attributes:
        data: Groups of processes that get different data.
        context: Processes that share the tokens of a sequence.
        tensor: Processes that share the weights of a layer.
        shards: Processes that share the tokens between the blocks of a layer: `tensor` with sequence parallelism, or 1.
    """

    data: int = 1
    context: int = 1
    tensor: int = 1
    shards: int = 1

    @property
    def processes(self) -> int:
        return self.data * self.context * self.tensor

    @property
    def replicas(self) -> int:
        """Processes that hold the same weights and different tokens: what ZeRO shards over."""
        return self.data * self.context

    def describe(self, zero_stage: int) -> str:
        """A short name, like "dp2-cp2-tp1-zero3"."""
        sequence = "sp" if self.shards > 1 else ""
        return f"dp{self.data}-cp{self.context}-tp{self.tensor}{sequence}-zero{zero_stage}"


def resolve_sizes(config: MemoConfig, processes: int) -> ParallelSizes:
    """The sizes for this many processes.

    Raises:
        ValueError: They do not multiply to the number of processes.
    """
    context, tensor = config.context_parallel_size, config.tensor_parallel_size
    if config.data_parallel_size == "auto" and processes % (context * tensor) == 0:
        data = processes // (context * tensor)
    elif config.data_parallel_size == "auto":
        raise ValueError(
            f"context_parallel_size={context} x tensor_parallel_size={tensor} = {context * tensor} does not divide the "
            f"{processes} processes: start a multiple of {context * tensor} (Trainer devices x num_nodes), or lower one"
        )
    else:
        data = int(config.data_parallel_size)
    if data * context * tensor != processes:
        raise ValueError(
            f"data_parallel_size={data} x context_parallel_size={context} x tensor_parallel_size={tensor} = "
            f"{data * context * tensor}, but there are {processes} processes: start as many (Trainer devices x "
            'num_nodes), or leave data_parallel_size="auto"'
        )
    return ParallelSizes(data=data, context=context, tensor=tensor, shards=tensor if config.sequence_parallel else 1)


def ulysses_size(config: MemoConfig, heads: int, kv_heads: int) -> int:
    """Processes of each all-to-all of Ulysses attention; the others form rings.

    Args:
        config: The settings.
        heads: Query heads on one process, tensor parallelism counted.
        kv_heads: Key-value heads on one process.

    Raises:
        ValueError: The heads cannot be spread over so many processes.
    """
    context, method = config.context_parallel_size, config.context_parallel_method
    if method == "ring" or context == 1:
        return 1
    if method == "usp" and config.ulysses_size == "auto":
        return choose_ulysses(context, heads, kv_heads)
    wanted = context if method == "ulysses" else int(config.ulysses_size)
    if heads % wanted:
        fitting = ", ".join(str(n) for n in range(1, context + 1) if context % n == 0 and heads % n == 0)
        raise ValueError(
            f"Ulysses attention spreads {heads} heads over {wanted} processes, which does not go: set "
            f'context_parallel_method="usp" with ulysses_size one of {fitting}, or "ring"'
        )
    return wanted


def choose_ulysses(context_size: int, heads: int, kv_heads: int) -> int:
    """Processes of the all-to-all group when tokens are split both ways; the ring has the others.

    The largest divisor of `context_size` that divides query and key heads; where none above 1 divides both, the largest
    that divides the query heads (key and value heads are then sent more than once).
    """
    divisors = [n for n in range(1, context_size + 1) if context_size % n == 0 and heads % n == 0]
    even = max(n for n in divisors if kv_heads % n == 0)
    return even if even > 1 else max(divisors)
