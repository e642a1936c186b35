"""What the processes of pipelines agree on for each batch.

Note: [One order of collectives]
With ZeRO 2 and 3, each micro-batch reduces gradients, and gathers weights, among the processes that hold the same
weights. All of them must therefore run the same forwards and backwards in the same order: as many micro-batches, and
all of them one by one if any process has to profile. The same holds for pipelines that share experts, and send each
other tokens. Otherwise, with ZeRO 0 and 1, pipelines beside each other meet at the end of a batch only.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memo.parallel.parallel_sizes import ParallelSizes

_SAME = 1e-6  # as a fraction of the number


class BatchAgreement:
    """Compares numbers of the processes of a run.

    Args:
        readers: The processes of one pipeline, which read the same batches.
        zero_stage: ZeRO stage.
        sizes: Sizes of the kinds of parallelism.
        device: Device of this process.
    """

    def __init__(self, readers: dist.ProcessGroup, zero_stage: int, sizes: ParallelSizes, device: torch.device) -> None:
        self._zero_stage, self._sizes, self._device = zero_stage, sizes, device
        self._group = dist.group.WORLD if zero_stage >= 2 or self._sizes.shares_experts else readers

    def _why(self, zero: bool, experts: bool) -> tuple[str, str]:
        """Return the settings that ask for equal numbers, and what to set in their place."""
        given = {"zero_stage": (zero, self._zero_stage), "expert_parallel_size": (experts, self._sizes.expert)}
        names = [name for name, (matters, _) in given.items() if matters]
        return " and ".join(f"{name}={given[name][1]}" for name in names), " and ".join(f"{name}=1" for name in names)

    def most(self, number: int) -> int:
        """Return the largest number of any process that runs in the same order."""
        return int(self._range(torch.tensor(float(number)))[1])

    def check_micro_batches(self, count: int, training: bool) -> None:
        """Check that processes which wait for each other in each micro-batch have equally many.

        Args:
            count: Number of micro-batches of this process's batch.
            training: Whether they have backwards.

        Raises:
            ValueError: They have not. All processes raise it.
        """
        by_zero = self._zero_stage >= (2 if training else 3)
        if not by_zero and not self._sizes.shares_experts:
            return
        least, most = self._range(torch.tensor(float(count)))
        if least < most:
            settings, instead = self._why(by_zero, self._sizes.shares_experts)
            raise ValueError(
                f"pipeline_parallel_size: processes have {least:.0f} to {most:.0f} micro-batches in a batch, and with "
                f"{settings} each waits for the others in each of them: give batches of equally many rows to all "
                f"data-parallel processes, or set {instead}"
            )

    def check_factor(self, factor: Tensor) -> None:
        """Check that all processes multiply gradients by the same number that several have contributed to.

        Args:
            factor: The gradient of the loss that this process's model has returned, a scalar.

        Raises:
            ValueError: They do not. All processes raise it.
        """
        by_zero, by_experts = self._zero_stage >= 2, self._sizes.expert > 1
        if not by_zero and not by_experts:
            return
        least, most = self._range(factor)
        if most - least > _SAME * max(abs(least), abs(most)):
            settings, instead = self._why(by_zero, by_experts)
            raise ValueError(
                f"pipeline_parallel_size: the training step multiplies the model's loss by {least:.6g} to {most:.6g} "
                f"in other processes, and with {settings} gradients have been summed over them before: multiply it by "
                f"the same number in all processes, or set {instead}"
            )

    def _range(self, number: Tensor) -> tuple[float, float]:
        """Return the smallest and the largest number of the processes."""
        both = torch.stack([-number, number]).to(self._device, torch.float64)
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=self._group)
        least, most = both.tolist()
        return -least, most
