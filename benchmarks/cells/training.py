"""Runs a cell in this process, with Lightning's Trainer on random tokens."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from peers import Peer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader
from typing_extensions import override

from cells import memory
from cells.cell import Cell, Effort, Result
from cells.flops import shape_of, step_flops
from cells.methods import Method, method_of
from cells.peak import Peak, peak_of
from cells.steps import Steps
from lightning_memo.estimate.cluster import load_preset
from lightning_memo.loss.attach_loss import attach_chunked_loss
from lightning_memo.models import ModelConfig, build_model
from lightning_memo.trials.training_trial import QUIET, RandomTokens

_LORA = {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"}
# PEFT would add the adapters of experts to their weights in every forward.
_LORA_WITH_EXPERTS = {**_LORA, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
_BACKENDS = {"sdpa": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_LEARNING_RATE = 1e-5


def train(cell: Cell, effort: Effort, tell: Callable[[Result], None]) -> Result:
    """Measures a cell.

    Args:
        cell: The cell.
        effort: How long to measure.
        tell: Receives the results so far after a step.

    Returns:
        The measurements.

    Raises:
        Unavailable: The method cannot be used here.
        Exception: Any error of the training.
    """
    method = method_of(cell)
    device = torch.device(cell.device, 0) if cell.device == "cuda" else torch.device(cell.device)
    if device.type == "cuda" and cell.allocator == "expandable_segments":
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    torch.manual_seed(0)
    peak = peak_of(device)
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        stack.enter_context(_same_kernel(cell, method))
        if not method.triton:
            stack.enter_context(mock.patch.dict(sys.modules, {"triton": None}))  # which then cannot be imported
        module = CellModule(cell, method, stack)

        known: Result = {}

        def keep() -> None:
            known.update(_result(module, steps, peak, device))
            tell(known)

        steps = Steps(
            effort,
            planned=lambda: _planned(trainer.strategy, cell.tokens // cell.ranks),
            settled=lambda: _settled(trainer.strategy),
            memory=lambda: _memory_state(trainer.strategy),
            tell=keep,
        )
        trainer = pl.Trainer(
            **QUIET, strategy=method.strategy(cell), callbacks=[steps], default_root_dir=folder,
            devices=cell.ranks, accelerator="gpu" if device.type == "cuda" else "cpu", precision=cell.precision,
        )  # fmt: skip
        trainer.fit(module, DataLoader(_batches(cell, effort, device, steps.most), batch_size=None))
        return known


def _batches(cell: Cell, effort: Effort, device: torch.device, most: int) -> list[dict[str, Tensor]]:
    """Yields the same sequence on the device again and again, after a shorter one if requested."""
    batch_of = RandomTokens(vocabulary=shape_of(cell).vocab)
    lengths = [effort.prime_tokens] * bool(effort.prime_tokens) + [cell.tokens]
    first, last = ({name: t.to(device) for name, t in batch_of(tokens).items()} for tokens in (lengths[0], lengths[-1]))
    return [first] + [last] * most


class CellModule(pl.LightningModule):
    """Builds a Hugging Face model with random weights, and puts a method around it.

    Args:
        cell: The cell.
        method: The method of the cell.
        stack: Removes the method from the model when it closes.
    """

    def __init__(self, cell: Cell, method: Method, stack: ExitStack) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        self.cell, self.method = cell, method
        self.peer = Peer()
        self._stack = stack

    @override
    def configure_model(self) -> None:
        if self.model is not None:
            return
        config = dict(load_preset("model", self.cell.model)["config"])
        config["max_position_embeddings"] = max(config["max_position_embeddings"], self.cell.tokens)
        if self.cell.layers is not None:
            config["num_hidden_layers"] = self.cell.layers
        lora = _LORA_WITH_EXPERTS if "num_experts" in config else _LORA
        self.model = build_model(ModelConfig(config=config, lora=lora if self.cell.tuning == "lora" else {}))
        if self.method.attach is not None:
            if self.cell.loss == "chunked" and not self.method.own_loss:
                for undo in attach_chunked_loss(self.model):
                    self._stack.callback(undo)
            self.peer = self.method.attach(self.model, self._stack)

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        assert self.model is not None
        loss: Tensor = self.model(**batch).loss if self.peer.loss is None else self.peer.loss(batch)
        return loss

    # Lightning clears gradients between forward and backward, which would lose those that ALST's loss writes in the
    # forward pass: such a step begins without gradients.

    @override
    def on_train_batch_start(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        if self.peer.loss is not None:
            self.zero_grad()

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        if self.peer.loss is None:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        weights = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(weights, lr=_LEARNING_RATE, fused=True)

    @property
    def parameters_and_trained(self) -> tuple[int, int]:
        """Returns the number of weights, and of weights that have a gradient."""
        sizes = [(p.numel(), p.requires_grad) for p in self.parameters()]
        return sum(size for size, _ in sizes), sum(size for size, trained in sizes if trained)


def _same_kernel(cell: Cell, method: Method) -> AbstractContextManager[None]:
    """Makes Hugging Face's attention use the requested kernel or fail; the strategy receives it as a setting."""
    if method.is_memo or cell.device != "cuda":
        return contextlib.nullcontext()
    return sdpa_kernel(_BACKENDS[cell.attention])


def _planned(strategy: Any, tokens: int) -> bool:
    """Returns whether a step runs by the plan of this many tokens of a process, and not by one before it."""
    if not hasattr(strategy, "plan"):
        return True
    return bool(strategy.follows_plan and strategy.plan.costs.tokens >= tokens)


def _settled(strategy: Any) -> bool:
    """Returns whether memory is planned, if requested."""
    planned = getattr(strategy, "memory", None)
    return planned is None or bool(planned.settled)


def _memory_state(strategy: Any) -> str:
    """Returns the name of the state of memory planning, or "UNPLANNED"."""
    planner = getattr(strategy, "memory", None)
    return "UNPLANNED" if planner is None else str(planner.state.name)


def _result(module: CellModule, steps: Steps, peak: Peak | None, device: torch.device) -> Result:
    cell, strategy = module.cell, module.trainer.strategy
    swap = None if getattr(strategy, "plan", None) is None else strategy.plan.swap
    engine = getattr(strategy, "engine", None)
    alpha = swap.alpha if swap is not None and not swap.plain else None
    by_kind = swap is not None and not swap.storage.has_one_alpha
    weights, trained = module.parameters_and_trained
    flops = step_flops(cell, trained / weights, alpha, by_kind)
    seconds = steps.median_seconds
    return {
        **steps.as_json(),
        "tokens_per_second": cell.tokens / seconds if seconds else None,
        "flops": asdict(flops),
        "peak": None if peak is None else asdict(peak),
        "mfu": share(flops.model, seconds, peak, cell.ranks),
        "hfu": share(flops.hardware, seconds, peak, cell.ranks),
        "parameters": weights,
        "trained_parameters": trained,
        "memory": {
            **memory.of_host(),
            **memory.of_device(device),
            **steps.memory,
        },  # of timed steps, if any
        "swapped_host_bytes": 0 if engine is None else engine.host_bytes,
        "plan": None if swap is None else _plan(strategy, swap),
        "packages": list(module.peer.packages),
    }


def _plan(strategy: Any, swap: Any) -> Result:
    """Returns the plan of the strategy."""
    planned = strategy.memory
    return {
        "mode": "plain" if swap.plain else "memo",
        "alpha": swap.alpha,
        "expected_seconds": strategy.plan.step_seconds,
        "joint_attention": swap.joint_attention,
        "stream_from_host": swap.stream_from_host,
        "memory_planned": planned is not None and planned.stats is not None,
        "overflow_bytes": 0 if strategy.engine.memory is None else strategy.engine.memory.stats.overflow_bytes,
    }


def share(flops: float | None, seconds: float | None, peak: Peak | None, devices: int) -> float | None:
    """Returns the share of the peak of some devices, or `None` if a value is unknown."""
    if flops is None or seconds is None or peak is None:
        return None
    return flops / seconds / peak.flops / devices
