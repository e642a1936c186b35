"""Trains in a loop of the user's own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import Self

from lightning_memo.artifacts.plan import Plan
from lightning_memo.config import MemoConfig, refusing_gone
from lightning_memo.engine import TestMode
from lightning_memo.integrations.training_loop import LoopBatches, LoopProcesses, LoopRun
from lightning_memo.runtime.memory_planner import MemoryPlanner
from lightning_memo.runtime.start_engine import check_machine, start_engine
from lightning_memo.runtime.training_runtime import TrainingRuntime


class MemoLoop(contextlib.AbstractContextManager["MemoLoop"]):
    """Trains on sequences whose activations do not fit in GPU memory, in a PyTorch loop without Lightning.

    Inside the context, the loop stays as it is: call the model, call `backward`, step the optimizer.

        with MemoLoop(model, optimizer) as memo:
            for batch in loader:
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    The first batch is profiled, and a plan is made from it, as by :class:`~lightning_memo.MemoStrategy`, whose settings
    these are. The model has to be on its device already. Gradient accumulation, autocast, several forwards before a
    backward, several optimizers and forwards under `torch.no_grad()` need nothing more. `memo.step(...)` in place of
    forward and backward can also run a batch again whose backward ran out of memory.

    Args:
        model: The model that the loop calls.
        optimizer: Its optimizer, or a list of them.
        output_dir: Folder for `memo_plan.json`. `None` writes no file.
        alpha: As for `MemoStrategy`, like all that follows.

    Raises:
        ValueError: A setting is wrong, or contradicts another one.
    """

    @refusing_gone
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        output_dir: str | Path | None = None,
        alpha: float | str = "auto",
        plan_memory: bool = True,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        spill_path: str | Path | None = None,
        spill_memory: str | int | None = None,
        slice_tokens: int | str = "auto",
        host_backed: str = "auto",
        storage: str = "auto",
        loss_chunk_tokens: int | str | None = "auto",
        layers: str | Sequence[str] | None = None,
        attention: str = "auto",
        schedule: str = "auto",
        plan: str | Path | None = None,
        check_slices: bool = True,
        test_mode: TestMode | None = None,
    ) -> None:
        self.config = self.check(locals())
        if not isinstance(model, nn.Module):
            raise ValueError(f"model: got {type(model).__name__}; give the torch.nn.Module that the loop calls")
        self._model = model._modules.get("_original_module") or model  # Fabric's wrapper passes attributes on to it
        given: list[Any] = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        # Those of Accelerate and Fabric are wrapped around PyTorch's.
        self._optimizers: list[Optimizer] = [getattr(each, "optimizer", each) for each in given]
        if not self._optimizers or not all(isinstance(each, Optimizer) for each in self._optimizers):
            kinds = ", ".join(type(each).__name__ for each in given) or "none"
            raise ValueError(f"optimizer: got {kinds}; give the torch.optim.Optimizer of the model, or a list of them")
        self._output_dir, self._test_mode = output_dir, test_mode
        self._runtime: TrainingRuntime | None = None
        self._batches: LoopBatches | None = None
        self._ended = False

    @staticmethod
    def check(given: Mapping[str, Any]) -> MemoConfig:
        """Check settings before there is a model.

        Args:
            given: Values by name. Names that are no settings of `MemoStrategy` are ignored.

        Returns:
            The settings, with defaults for those that are not given.

        Raises:
            ValueError: A setting is wrong, contradicts another one, or needs what this machine lacks.
        """
        if given.get("schedule") == "slice":
            raise ValueError('schedule="slice" runs whole training steps, which are the loop\'s here: use MemoStrategy')
        config = MemoConfig.of(given)
        check_machine(config)
        return config

    @property
    def is_active(self) -> bool:
        """Whether the context has been entered, and has not been left."""
        return self._runtime is not None and not self._ended

    @property
    def plan(self) -> Plan | None:
        """The plan in force; `None` until the first batch is over."""
        return None if self._runtime is None else self._runtime.plan

    @property
    def memory(self) -> MemoryPlanner | None:
        """The memory plan and its counters; `None` without `plan_memory`."""
        return None if self._runtime is None else self._runtime.memory

    def __enter__(self) -> Self:
        if self._runtime is not None:
            raise ValueError("a MemoLoop is entered once: make a new one for the next loop")
        # Lightning sets it when it is imported, from the environment of the process.
        if not hasattr(rank_zero_only, "rank"):
            rank_zero_only.rank = dist.get_rank() if dist.is_initialized() else 0  # type: ignore[attr-defined]
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        processes = LoopProcesses.initialized()
        engine = start_engine(self._model, self.config, device, processes, True, self._test_mode)
        run = LoopRun(self._model, self._optimizers, self._output_dir)
        self._runtime = TrainingRuntime(engine, self._model, self.config, processes, run)
        self._batches = LoopBatches(self._model, engine.layers[0], self._optimizers, self._runtime, run)
        try:
            self._runtime.start()
            self._batches.attach()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._runtime is not None and self._batches is not None
        try:
            if error is None:
                self._batches.end()
            else:
                self._runtime.fail()
        finally:
            self._stop()
        advised = self._runtime.advise(error) if isinstance(error, torch.OutOfMemoryError) else None
        if advised is not None:
            raise advised from error

    def _stop(self) -> None:
        assert self._runtime is not None and self._batches is not None
        self._ended = True
        self._batches.detach()
        self._runtime.close(self._model)

    def step(self, forward: Callable[[], Tensor], backward: Callable[[Tensor], object] = Tensor.backward) -> Tensor:
        """Run the forward and the backward of a batch. If the device runs out of memory, they run again with less.

        Args:
            forward: Computes the loss, a scalar. It is called again after a lack of memory.
            backward: Runs the backward of the loss, for example `accelerator.backward`.

        Returns:
            The loss.

        Raises:
            ValueError: The context has not been entered.
            torch.OutOfMemoryError: The device has too little memory, even with every layer recomputed.
        """
        if self._batches is None or self._ended:
            raise ValueError("MemoLoop.step is called inside of `with MemoLoop(model, optimizer) as memo:`")
        return self._batches.retried(forward, backward)
