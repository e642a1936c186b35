"""Messages of a pipeline: hidden states and gradients between stages, and numbers that processes compare for a batch.

Note: [One order of collectives]
With ZeRO 2 and 3, each micro-batch reduces gradients, and gathers weights, among the processes that hold the same
weights. All of them must therefore run the same forwards and backwards in the same order: as many micro-batches, and
all of them one by one if any process has to profile. The same holds for pipelines that share experts, and send each
other tokens. Otherwise, with ZeRO 0 and 1, pipelines beside each other meet at the end of a batch only.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_memo.parallel.parallel_sizes import ParallelSizes

_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DESCRIBED: Final = 10  # numbers that describe hidden states, which have up to 6 dimensions
_SAME = 1e-6  # as a fraction of the number


class StageMessages:
    """Point-to-point messages between neighbouring stages. With several blocks of layers, the stages are a ring.

    Sends do not wait; a message is received when it is asked for. NCCL sends what two ranks of a group send each other
    one after the other, so that gradients have a group of their own: a stage that sends a hidden state and waits for a
    gradient, and its neighbour that does the opposite, would wait for each other. For the same reason, so have messages
    between the last stage and the first one, which are neighbours in both directions if there are two stages.

    Args:
        groups: Groups of the stages, in order: for hidden states and for gradients, and, with several blocks of layers,
            for those between the last stage and the first one.
        device: Device of this process.
    """

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device) -> None:
        (self._onward, self._back), (self._around, self._around_back) = groups[:2], groups[-2:]
        self.device = device
        self.stages, self.stage = dist.get_world_size(self._onward), dist.get_rank(self._onward)
        self._sending: list[tuple[dist.Work, Tensor]] = []
        self._shape: torch.Size | None = None
        self._dtype, self._returned = torch.float32, 0
        self._tells_shape, self._order = True, 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.stages - 1

    def begin(self, bounds: Sequence[int] = ()) -> None:
        """Begin a batch, whose hidden states all have one shape. The first message says which.

        Args:
            bounds: Where the slices end that decide in which order a process holds the tokens of the batch.
        """
        self._shape, self._tells_shape = None, True
        self._order = functools.reduce(lambda a, b: (a * 1_000_003 + b + 1) % 2**61, bounds, 0)

    def send_hidden(self, hidden: Tensor, returned: int) -> None:
        """Begin to send the output of this stage's layers for a micro-batch to the next stage.

        Args:
            hidden: The hidden states.
            returned: Number of values in the tuple that layers return; 0 if they return hidden states alone.
        """
        hidden = hidden.detach().contiguous()
        group = self._around if self.is_last else self._onward
        if self._tells_shape:
            self._tells_shape = False
            described = [self._order, returned, _DTYPES.index(hidden.dtype), hidden.dim(), *hidden.shape]
            described += [0] * (_DESCRIBED - len(described))
            self._send(torch.tensor(described, device=self.device), group, self.stage + 1)
        self._send(hidden, group, self.stage + 1)

    def receive_hidden(self) -> tuple[Tensor, int]:
        """Return what the stage before has sent for the next micro-batch: hidden states, and what layers return.

        Raises:
            RuntimeError: The stage before has the tokens of the batch in another order.
        """
        group = self._onward if self.stage > 0 else self._around
        if self._shape is None:
            described = torch.empty(_DESCRIBED, dtype=torch.int64, device=self.device)
            self._receive(described, group, self.stage - 1)
            order, returned, dtype, dims, *sizes = described.tolist()
            if order != self._order:
                raise RuntimeError(
                    "pipeline_parallel_size: a stage cuts the batch into other slices than the stage before, and so "
                    "has its tokens in another order: set sequence_parallel=False"
                )
            self._shape, self._dtype, self._returned = torch.Size(sizes[:dims]), _DTYPES[dtype], returned
        hidden = torch.empty(self._shape, dtype=self._dtype, device=self.device)
        self._receive(hidden, group, self.stage - 1)
        return hidden, self._returned

    def send_gradient(self, gradient: Tensor) -> None:
        """Begin to send the gradient of the input of this stage's layers to the stage before."""
        self._send(gradient.contiguous(), self._back if self.stage > 0 else self._around_back, self.stage - 1)

    def receive_gradient(self, hidden: Tensor) -> Tensor:
        """Return the gradient of an output of this stage's layers, from the next stage."""
        gradient = torch.empty(hidden.shape, dtype=hidden.dtype, device=self.device)
        self._receive(gradient, self._around_back if self.is_last else self._back, self.stage + 1)
        return gradient

    def share(self, value: Tensor, says: bool) -> tuple[Tensor, bool]:
        """Return the sum of a number over all stages, and whether any of them says so, on all stages.

        Args:
            value: The number, an fp32 scalar.
            says: Whether this stage says so.
        """
        both = torch.stack([value, torch.full_like(value, says)])
        dist.all_reduce(both, group=self._onward)
        return both[0], bool(both[1].item())

    def settle(self) -> None:
        """Wait until everything has been sent."""
        for work, _ in self._sending:
            work.wait()
        self._sending.clear()

    def _receive(self, t: Tensor, group: dist.ProcessGroup, of: int) -> None:
        dist.recv(t, group=group, group_src=of % self.stages)

    def _send(self, t: Tensor, group: dist.ProcessGroup, to: int) -> None:
        self._sending = [(work, sent) for work, sent in self._sending if not work.is_completed()]
        if (work := dist.isend(t, group=group, group_dst=to % self.stages)) is not None:
            self._sending.append((work, t))  # which must live until it is sent


class BatchAgreement:
    """Compares numbers of the processes of a run; see Note: [One order of collectives].

    Args:
        readers: The processes of one pipeline, which read the same batches.
        zero_stage: ZeRO stage.
        sizes: Sizes of the kinds of parallelism.
        device: Device of this process.
    """

    def __init__(self, readers: dist.ProcessGroup, zero_stage: int, sizes: ParallelSizes, device: torch.device) -> None:
        self._zero_stage = zero_stage
        self._sizes = sizes
        self._device = device
        self._group = dist.group.WORLD if zero_stage >= 2 or sizes.shares_experts else readers

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
