"""The collectives of an optimizer step, counted and as expected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from support.parallel_training import Run

RUN = Run(family="llama", tokens=16, accumulate=2, steps=2, batch=4, layers=2)

LAYERS = RUN.layers

UNITS = LAYERS + 1  # and the root: embedding, last norm, head


class Collectives(Callback):
    """Counts collectives of an optimizer step.

    Args:
        counting: What counts; by default, collectives on tensors of more than one number.
    """

    def __init__(self, counting: Callable[[], Counting] | None = None) -> None:
        self.notes: dict[str, Any] = {}
        self._counting = Counting() if counting is None else counting()

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == RUN.accumulate - 1:  # the second optimizer step comes: nothing is profiled or made
            self.notes["counts"] = self._counting.__enter__().counts

    @override
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        if "counts" in self.notes:
            self._counting.__exit__(None, None, None)


class Counting(TorchDispatchMode):
    """Counts collectives as they reach the process group."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [t.numel() for t in tree_leaves(args) if isinstance(t, Tensor)]
            self.counts[func._schema.name.removeprefix("c10d::")] += max(sizes, default=0) > 1
        return func(*args, **(kwargs or {}))


GATHER, SCATTER, REDUCE = "_allgather_base_", "_reduce_scatter_base_", "allreduce_"

EXPECTED = {
    0: {REDUCE: UNITS},
    1: {GATHER: UNITS, SCATTER: UNITS},
    2: {GATHER: UNITS, SCATTER: UNITS * RUN.accumulate},
    3: {
        GATHER: (UNITS + LAYERS) * RUN.accumulate,
        SCATTER: UNITS * RUN.accumulate,
    },
}
