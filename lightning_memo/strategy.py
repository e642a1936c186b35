"""The Lightning strategy: settings in, hooks wired, no algorithms."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_memo.callbacks import PlanAfterFirstStep, PlanMemory
from lightning_memo.config import MemoConfig
from lightning_memo.engine import Engine, TestMode
from lightning_memo.engine.find import find_layers
from lightning_memo.kernels.select import check_available
from lightning_memo.plan import Plan


class MemoStrategy(ModelParallelStrategy):
    """Trains sequences that do not fit, by swapping a share of each layer's activations and recomputing the others.

    `Trainer(strategy=MemoStrategy(...))`, or `Trainer(strategy="memo")` after `import lightning_memo`. The first batch
    is profiled; then a share alpha of the tokens has its activations swapped to host memory while later layers compute,
    and the others have theirs recomputed in the backward, attention excepted (MEMO). Gradients are those of plain
    training. Nothing else changes in the LightningModule, whose model may be built in `__init__` or `configure_model`.

    Args:
        data_parallel_size: Processes that hold different data; this version trains in one process.
        context_parallel_size: Processes that share a sequence; this version trains in one process.
        tensor_parallel_size: Processes that share a layer; this version trains in one process.
        zero_stage: What data-parallel processes shard; 0 in this version.
        context_parallel_method: "ring" or "ulysses".
        alpha: Share of the tokens whose activations are swapped, 0.0 to 1.0; "auto" solves for it.
        plan_memory: Place every buffer of a step ahead, and serve the places by a planned allocator: nothing fragments.
        device_memory: Device memory to plan with, like "40GiB" or bytes; `None` measures what is free.
        host_memory: Host memory for swapped activations; `None` takes 90 % of what is free, cgroup limits respected.
        slice_tokens: Longest slice of tokens that runs through a layer at once; "auto" cuts at alpha only.
        layers: Dotted name of the `nn.ModuleList` of repeated layers; `None` finds it.
        attention: Attention kernel: "auto", "sdpa", "cudnn", "flash_attn" or "transformer_engine".
        schedule: "auto"; "layer" or "nest" to force the order of slices.
        plan: A saved plan to use instead of profiling.
        test_mode: Random delays and poisoned buffers, to bring out copy races. Slow; for tests.

    Raises:
        ValueError: A setting is wrong, or contradicts another.
    """

    strategy_name = "memo"

    def __init__(
        self,
        data_parallel_size: int | str = "auto",
        context_parallel_size: int = 1,
        tensor_parallel_size: int = 1,
        zero_stage: int = 0,
        context_parallel_method: str = "ring",
        alpha: float | str = "auto",
        plan_memory: bool = True,
        device_memory: str | int | None = None,
        host_memory: str | int | None = None,
        slice_tokens: int | str = "auto",
        layers: str | None = None,
        attention: str = "auto",
        schedule: str = "auto",
        plan: str | Path | None = None,
        test_mode: TestMode | None = None,
    ) -> None:
        self.config = MemoConfig(
            data_parallel_size=data_parallel_size,
            context_parallel_size=context_parallel_size,
            tensor_parallel_size=tensor_parallel_size,
            zero_stage=zero_stage,
            context_parallel_method=context_parallel_method,
            alpha=alpha,
            plan_memory=plan_memory,
            device_memory=device_memory,
            host_memory=host_memory,
            slice_tokens=slice_tokens,
            layers=layers,
            attention=attention,
            schedule=schedule,
            plan=None if plan is None else str(plan),
        )
        check_available(attention)
        if plan is not None and not Path(plan).is_file():
            raise ValueError(f'plan="{plan}": no such file; give one that Plan.save wrote, or None to profile')
        super().__init__(data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=False)
        self.engine: Engine | None = None
        self._test_mode = test_mode
        self._planning: PlanAfterFirstStep | None = None
        self.memory: PlanMemory | None = None

    def __repr__(self) -> str:
        # `pytorch_lightning.Trainer` refuses foreign strategies and prints them: the one place to say what to do.
        hint = (
            "; needs lightning.pytorch.Trainer, not pytorch_lightning.Trainer"
            if "pytorch_lightning" in sys.modules
            else ""
        )
        return f"<MemoStrategy alpha={self.config.alpha}{hint}>"

    @property
    def plan(self) -> Plan | None:
        """The plan in force; `None` until the first batch is over."""
        return None if self._planning is None else self._planning.plan

    # ---- one process

    @override
    def _configure_launcher(self) -> None:
        if self.num_processes * self.num_nodes != 1:
            raise ValueError(
                f"MemoStrategy got {self.num_processes} devices on {self.num_nodes} nodes, but this version trains in "
                "one process: set Trainer(devices=1, num_nodes=1)"
            )

    @override
    def setup_environment(self) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        # One process reads all the data in the user's own order, as it would without this strategy.
        self.lightning_module.trainer._accelerator_connector.use_distributed_sampler = False

    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[None]:
        # Weights are made on the device. The parent would make them on "meta", and fill them with random ones in setup.
        return Strategy.tensor_init_context(self, empty_init)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    # ---- the engine

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.model is not None and self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()
        if trainer.state.fn == TrainerFn.FITTING:
            self._start_engine(trainer, self.model)

    def _start_engine(self, trainer: pl.Trainer, model: nn.Module) -> None:
        _, layers = find_layers(model, self.config.layers)
        _refuse_gradient_checkpointing(model)
        self.engine = Engine(
            model, list(layers), self.root_device, self.config.attention, self.config.schedule, self._test_mode
        )
        self.engine.attach()
        self._planning = PlanAfterFirstStep(self.engine, self.config)
        self.memory = PlanMemory(self.engine, self._planning) if self.config.plan_memory else None
        # First of all callbacks, so that what the others do after a step lies outside of it.
        trainer.callbacks[:0] = self._callbacks

    @property
    def _callbacks(self) -> list[Callback]:
        return [callback for callback in (self._planning, self.memory) if callback is not None]

    def _stop_engine(self) -> None:
        if self.memory is not None:
            self.memory.close(self.lightning_module)
        if self.engine is not None:
            self.engine.detach()
        if self.lightning_module is not None:
            callbacks = self.lightning_module.trainer.callbacks
            callbacks[:] = [callback for callback in callbacks if callback not in self._callbacks]

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._stop_engine()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._stop_engine()
        super().teardown()

    # ---- checkpoints: one process, one file, as every single-device strategy writes them

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # the planning callback, made in setup, reads its plan from the checkpoint

    @property
    @override
    def lightning_restore_optimizer(self) -> bool:
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return Strategy.lightning_module_state_dict(self)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        Strategy.load_model_state_dict(self, checkpoint, strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return Strategy.optimizer_state(self, optimizer)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        Strategy.load_optimizer_state_dict(self, checkpoint)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)


def _refuse_gradient_checkpointing(model: nn.Module) -> None:
    if any(getattr(m, "gradient_checkpointing", False) is True for m in model.modules()):
        raise ValueError(
            "gradient checkpointing is on in the model, and MemoStrategy recomputes by itself: call "
            "model.gradient_checkpointing_disable(), or use MemoStrategy(alpha=0) for full recomputation"
        )


StrategyRegistry.register(MemoStrategy.strategy_name, MemoStrategy, description="Token-wise swapping and recomputation")
